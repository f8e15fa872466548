"""The generation engine: vLLM inside the worker process."""
