"""One file an algorithm: its options, its step and its advantage, as its paper has them; none knows a runtime.

The files import without torch: `rlhf_api.spec.algorithm_table` makes the table of algorithms from them.
"""

import rlhf_api as rlhf_api  # first: it imports these files, so that the table is whole whichever is asked for first
