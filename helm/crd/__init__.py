"""The files that `make generate` writes from the typed spec: the CRD, its pages in the docs, the chart's version."""
