"""`kubectl rlhf` and `rlhf submit`: commands about the RLHFJobs of a cluster, run through kubectl."""
