"""Programs that run in pods beside the trainer; without torch."""
