"""The operator: runs RLHFJobs on Kubernetes, one KubeRay RayJob an attempt. `rlhf-operator` starts it."""
