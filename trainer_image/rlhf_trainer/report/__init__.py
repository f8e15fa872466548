"""The page about a run: read the run folder, draw, fill the template. It needs files only, neither torch nor Ray."""
