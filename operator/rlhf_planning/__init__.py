"""What a job would do before it runs: its device mapping, the timeline and the graph of a step, in words and drawn."""
