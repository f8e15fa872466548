"""Checks between fields of a spec, as data, and the comparison of two specs on resume."""
