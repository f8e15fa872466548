"""How long the parts of a step take and what memory they need; each function takes arrays of layouts at once."""
