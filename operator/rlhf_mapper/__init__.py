"""Auto-mapper, which decides which models run on which slots (GPUs or CPU workers). Pure functions, no I/O."""
