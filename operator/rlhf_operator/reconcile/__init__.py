"""The decision of a reconcile pass. Pure: no clock, no cluster, no memory but the status; `decide` is the entry."""
