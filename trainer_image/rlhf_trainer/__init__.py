"""The trainer: one RLHF job, from its manifest to a Hugging Face checkpoint."""
