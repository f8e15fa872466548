"""The single controller: resource pools, worker groups and batches of references (HybridFlow section 4)."""
