"""vLLM looks at the model's class in the process that it is built in, also where its cache of classes is empty."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.generation.conftest import RunRanks
from tests.trainer.generation.engines import build
from tests.trainer.tiny import save_tiny


def build_where_no_process_can_look(folder: str) -> Any:
    """Build an engine where a process that vLLM started for a look would fail."""
    from vllm.model_executor.models import registry

    registry._SUBPROCESS_COMMAND = ["false"]
    build(folder, [[0]])
    return True


def test_an_engine_starts_no_process(tmp_path: Path, vllm_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = save_tiny(tmp_path / "model", seed=1)
    assert vllm_ranks(1, build_where_no_process_can_look, str(folder))
    assert list((tmp_path / "cache" / "modelinfos").iterdir()), "vLLM took it from another cache"
