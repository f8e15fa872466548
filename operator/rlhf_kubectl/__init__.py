"""`kubectl rlhf`: RLHFJobs of a cluster, asked and told through kubectl itself, with its user's rights."""
