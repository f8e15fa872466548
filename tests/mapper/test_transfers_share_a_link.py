"""Transfers that are under way at once share the bytes a second of their link."""

import re
from typing import Any

from rlhf_mapper.auto_map import auto_map
from rlhf_planning.checkpoint_size import upload_in_words
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of


def test_a_plan_says_what_an_upload_costs_the_weights() -> None:
    cluster = cluster_of(("h100-80g", 4, 8))

    def said(staleness: int = 1, **changes: Any) -> str:
        job = job_of("GRPO", rollout={"maxStaleness": staleness, "samplesPerPrompt": 4}, **changes)
        mapping = auto_map(job, cluster, shapes_of(job), device="GPU")
        return upload_in_words(job, shapes_of(job), mapping, cluster)

    sent, beside = map(float, re.findall(r"[0-9.]+(?= s)", said(checkpoint={"storage": "s3://bucket/runs"})))
    assert sent < beside <= 2 * sent
    assert said(checkpoint={"storage": "file:///runs"}) == said() == "", "no upload goes over the network"
    assert said(0, checkpoint={"storage": "s3://bucket/runs"}) == "", "no weights go over the network"
