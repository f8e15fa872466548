"""Checkpoints of a job in a folder or an object store: which there are, which are whole, and which may go."""
