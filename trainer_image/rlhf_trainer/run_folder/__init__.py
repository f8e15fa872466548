"""The run folder: the files of a run, its lock and its attempts, and the commands that read a run folder."""
