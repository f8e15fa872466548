"""What shows a run while it runs: the terminal, and by option TensorBoard files, a metrics port and a timeline."""
