"""Simulators of the time and the memory of a step's parts; each function takes arrays of layouts at once."""
