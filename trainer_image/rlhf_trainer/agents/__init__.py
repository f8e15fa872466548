"""Agents: programs of the user's that ask the model by OpenAI's API, through a proxy of the trainer's."""
