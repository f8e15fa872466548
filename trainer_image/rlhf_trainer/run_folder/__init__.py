"""The run folder: what a run leaves in it, whose it is, and what can be asked of it during the run or after."""
