"""Diagnosis of a job from its files: change points, signals and causes. Pure functions on numpy, without a network."""
