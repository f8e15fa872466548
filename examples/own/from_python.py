"""The project's jobs from Python."""

import rlhf

jobs = rlhf.load("job.yaml", sets=["training.totalSteps=2"])
print(rlhf.plan(jobs)["better-half"]["pools"])
run = rlhf.run(jobs, output="run")
print(run["better-half"].metrics()["reward/mean"])
