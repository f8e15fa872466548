"""The API server as the operator uses it: `observe` reads, `apply` writes."""
