"""Arithmetic, whose answers can be checked without a reward model."""
