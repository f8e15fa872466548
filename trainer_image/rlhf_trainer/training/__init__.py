"""The training engine: a transformers model sharded by FSDP2, its optimizer and its micro-batches."""
