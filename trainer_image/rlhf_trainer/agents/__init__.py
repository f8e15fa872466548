"""Agents: the user's programs, which call the model by OpenAI's API through the trainer's proxy."""
