"""The operator: runs RLHFJobs on Kubernetes, one KubeRay RayJob an attempt. `python -m rlhf_operator` starts it."""
