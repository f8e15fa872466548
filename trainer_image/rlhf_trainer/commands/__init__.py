"""The commands of `rlhf`: the command line, and a file for each command that is more than a call."""
