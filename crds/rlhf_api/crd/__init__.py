"""The custom resource of a cluster, made from the typed spec: what `rlhf validate` refuses, its API server refuses."""
