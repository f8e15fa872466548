"""Environments that answer the model, each episode in a guarded process of its own; tools are an environment, too."""
