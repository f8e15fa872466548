"""The demo's PPO with its real workers makes the calls that its graph shows, in the order of their levels."""

import json
from pathlib import Path

from rlhf_api.files import load
from rlhf_mapper.place import place
from rlhf_trainer.run.graph import graph_of
from tests.trainer.chain.conftest import MANIFEST, SHORT, records


def test_every_rank_makes_the_graphs_calls_and_no_more(chain: tuple[Path, str]) -> None:
    folder = chain[0] / "helpful-ppo"
    job = next(
        job for job in load(MANIFEST, [each.removeprefix("--set=") for each in SHORT]) if job.name == folder.name
    )
    graph = graph_of(job, place(job, (0,)))
    names = [call.name for call in graph.by_level]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for record in records(folder):
        assert 0 < record["bytes/transfer"] <= graph.bytes
        for rank in (0, 1):
            mine = [each for each in events if each["name"] in names and each["tid"] == rank]
            step = [each for each in mine if each["args"]["step"] == record["step"]]
            assert [each["name"] for each in sorted(step, key=lambda each: each["ts"])] == names
