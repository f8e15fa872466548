"""The page about a run: read the run folder, draw, fill the template. Knows files only, neither torch nor Ray."""
