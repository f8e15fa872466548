"""Transfers that are under way at once share the bytes a second of their link, as real sockets do."""

import re
import select
import socket
from collections.abc import Sequence
from threading import Thread
from typing import Any

import pytest

from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.simulate.overlap import ends_of
from rlhf_planning.checkpoint_size import upload_in_words
from tests.each import each_case
from tests.mapper.planned_jobs import cluster_of, job_of, shapes_of

TICK_BYTES, CHUNK = 1 << 16, 1 << 12
"""Bytes that the link carries in a tick, its clock, and bytes of one read from a socket."""


def carried(transfers: Sequence[tuple[int, int]]) -> list[int]:
    """Return the tick in which a paced link has carried each transfer (first tick, bytes)."""
    pairs = [socket.socketpair() for _ in transfers]
    senders = [Thread(target=pair[0].sendall, args=(b"x" * size,)) for pair, (_, size) in zip(pairs, transfers)]  # noqa: B905
    left, ends, tick = [size for _, size in transfers], [0] * len(transfers), 0
    while any(left):
        budget = TICK_BYTES
        for sender, (begin, _) in zip(senders, transfers, strict=True):
            if begin == tick:
                sender.start()
        while budget and (open_ := [each for each, (begin, _) in enumerate(transfers) if begin <= tick and left[each]]):
            for each in open_[: -(-budget // CHUNK)]:
                select.select([pairs[each][1]], [], [])
                came = len(pairs[each][1].recv(min(CHUNK, budget)))
                budget, left[each], ends[each] = budget - came, left[each] - came, tick + 1
        tick += 1
    for sender, pair in zip(senders, pairs, strict=True):
        sender.join()
        pair[0].close()
        pair[1].close()
    return ends


def test_sockets_on_a_paced_link_end_when_predicted() -> None:
    weights, upload = 40 * TICK_BYTES, 100 * TICK_BYTES
    (alone,) = carried([(0, upload)])
    bandwidth = upload / alone
    begun = [(0, upload), (30, weights)]
    predicted, measured = ends_of(begun, bandwidth), carried(begun)
    assert measured == pytest.approx(predicted, rel=0.15)
    assert (measured[1] - 30) * TICK_BYTES > 1.7 * weights, "each waits for the other"


@each_case(
    ("transfers", "ends"),
    [
        ([], []),
        ([(0.0, 10.0)], [10.0]),
        ([(0.0, 10.0), (0.0, 10.0)], [20.0, 20.0]),
        ([(0.0, 10.0), (5.0, 10.0)], [15.0, 20.0]),
        ([(7.0, 1.0), (0.0, 1.0), (7.0, 0.0)], [8.0, 1.0, 7.0]),
        ([(0.0, 12.0), (0.0, 3.0), (2.0, 3.0)], [18.0, 8.0, 10.0]),
    ],
)
def test_a_link_serves_all_that_are_under_way_alike(transfers: list[tuple[float, float]], ends: list[float]) -> None:
    assert ends_of(transfers, 1.0) == pytest.approx(ends)


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
