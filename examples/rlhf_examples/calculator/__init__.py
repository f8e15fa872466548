"""Remainders of products too large for a small model's head, and a calculator to find them with."""
