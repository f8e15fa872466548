"""Checks that span several fields of a spec, and the comparison of two specs on resume."""
