"""Running the jobs of a manifest: Ray, pools, worker groups, the loop, checkpoints and resumption."""
