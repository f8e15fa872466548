"""`rlhf import`: manifests from the configurations of other projects; a table of keys a project."""
