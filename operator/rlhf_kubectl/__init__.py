"""`kubectl rlhf`: commands about the RLHFJobs of a cluster, run through kubectl with the rights of its user."""
