"""The commands of `rlhf`: the command line, and a module for each command that needs more code than one call."""
