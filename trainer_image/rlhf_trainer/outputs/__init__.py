"""Outputs of a run while it runs: terminal, and on request TensorBoard, a metrics port, a timeline and trackers."""
