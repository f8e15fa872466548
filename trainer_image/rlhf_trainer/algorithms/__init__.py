"""Algorithms, one file each: options, step and advantage as the paper has them; no file knows a runtime.

The files import without torch: `rlhf_api.spec.algorithm_table` makes the table of algorithms from them.
"""
