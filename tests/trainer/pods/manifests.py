"""A job for tests that never train it."""

from typing import Any

SFT: dict[str, Any] = {
    "algorithm": {"name": "SFT"},
    "models": {"actor": {"uri": "hf://some/model", "optimizer": {"learningRate": 1e-3}}},
    "data": {"train": {"uri": "file:///data.jsonl"}},
    "training": {"totalSteps": 9, "batchSize": 2},
}
