"""Planning of a job before it runs: its device mapping, and the timeline and the graph of a step, in words."""
