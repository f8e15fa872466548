"""A run folder in pandas: what each job learnt, from its first steps to its last.

python examples/python/read_run.py runs/first
"""

import sys

import rlhf

for job in rlhf.load_run(sys.argv[1]).jobs:
    metrics = job.metrics()
    few = max(len(metrics) // 10, 1)
    ends = metrics.iloc[[*range(few), *range(-few, 0)]].groupby([0] * few + [1] * few).mean()
    ends.index = ["first steps", "last steps"]
    print(f"\n{job.name} ({job.algorithm}, {job.status.phase}): {len(metrics)} steps")
    print(ends.filter(regex="reward/mean|loss/|accuracy/|kl/ref|response_length").round(3).to_string())
