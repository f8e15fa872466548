"""The facts that a run tells of its data before it begins."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataWorker
from tests.trainer import jobs
from tests.trainer.tiny import EXAMPLE_MODEL


def test_every_data_set_tells_what_it_dropped(tmp_path: Path) -> None:
    sources = {}
    for long, name in enumerate(("train", "pretrain", "heldout"), start=1):
        rows = [{"prompt": "word " * 500, "chosen": "a"}] * long + [{"prompt": "a", "chosen": "b"}] * 4
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources[name] = {"uri": f"file://{name}.jsonl"}
    model = {"uri": "hf://x"}
    job = jobs.job(
        tmp_path,
        "ppo",
        {
            "algorithm": {"name": "PPO", "pretrainCoefficient": 1.0},
            "models": {"actor": model, "critic": model, "reward": model},
            "data": {
                "train": sources["train"],
                "pretrain": sources["pretrain"],
                "maxPromptTokens": 16,
                "maxResponseTokens": 16,
            },
            "training": {"totalEpochs": 2, "promptBatchSize": 3},
            "evaluation": {"data": sources["heldout"]},
        },
    )
    actor = job.models()["actor"]
    setting = WorkerSetting(job=job, role="actor", model=actor, folder=str(EXAMPLE_MODEL), total_steps=1)
    shape = DataWorker(setting, slots=1).describe()
    assert (shape.rows, shape.total_steps) == (4, 3), "2 epochs of 4 rows, 3 a step"
    end, *dropped = shape.facts
    assert end == "a response ends with </s> (2)"
    told = [fact.partition(" rows")[0] for fact in dropped]
    assert told == [
        "spec.data.train: 1 of 5",
        "spec.evaluation.data: 3 of 7",
        "spec.data.pretrain: 2 of 6",
    ]
