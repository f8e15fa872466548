"""The CustomResourceDefinition, made from the typed spec: the API server refuses what `rlhf validate` refuses."""
