"""What shows a run while it runs: the terminal, and on request TensorBoard, a metrics port, a timeline and trackers."""
