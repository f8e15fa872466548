"""The typed spec of a job: a file for each part of the manifest; `job_spec` puts them together."""
