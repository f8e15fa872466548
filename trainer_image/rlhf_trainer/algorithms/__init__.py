"""Training algorithms, one file each: options, step and advantage as in the paper; none depends on Ray or torchrun.

The files import without torch: `rlhf_api.spec.algorithm_table` makes the table of algorithms from them.
"""
