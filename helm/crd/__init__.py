"""The files that `make generate` writes from the typed spec: the CRD, its page in the docs, the chart's version."""
