"""Rewards that are no model: a user's function in a process of its own, and an HTTP service."""
