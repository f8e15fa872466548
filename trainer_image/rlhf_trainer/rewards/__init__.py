"""Rewards that are no model: a user's function in a process of its own, verifiers, an HTTP service, and a judge."""
