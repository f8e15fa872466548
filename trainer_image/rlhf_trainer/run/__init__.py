"""From a manifest to finished run folders: Ray, pools, worker groups, the loop and what it writes."""
