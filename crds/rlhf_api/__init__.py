"""The contract of rlhf-operator: the typed spec and status of a job, its names and its exit codes."""
