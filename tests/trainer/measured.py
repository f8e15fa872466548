"""Names of measurements that depend on the machine, and on how the work is shared; the rest must not."""

MACHINE = (
    "time/",
    "tokens_per_second",
    "busy/",
    "idle/",
    "rollout_idle",
    "trainer_idle",
    "queue/",
    "sync_seconds/",
    "memory_bytes/",
    "memory_used",
    "mfu",
    "peak_flops",
)
SHARED = (
    *MACHINE,
    *("flops/", "kv_cache_used", "padding/", "experts/", "idle_bytes/", "rollout_replacements"),
    *("computed_tokens", "shared_tokens"),
)
"""Beginnings of names; FLOPs and routers' choices, too, depend on the rows that begin alike on a rank."""
