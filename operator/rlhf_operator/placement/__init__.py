"""The placement of a job's models by the auto-mapper, on the nodes that a snapshot shows; `map_job` is the entry."""
