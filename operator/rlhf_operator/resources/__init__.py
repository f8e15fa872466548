"""The Kubernetes objects of a job as plain manifests. Pure; `attempt` lists what an attempt needs."""
