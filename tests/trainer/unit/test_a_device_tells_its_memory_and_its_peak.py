"""How much memory a container, or the process, uses; and the peak of a GPU."""

from pathlib import Path

import psutil
import pytest
import torch

from rlhf_mapper.hardware import FoundGpu
from rlhf_trainer import device


def test_a_containers_memory_is_counted_without_file_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert device.memory_in_use() == (550, 1000)


def test_without_a_limit_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    used, total = device.memory_in_use()
    mine = psutil.Process().memory_info().rss
    assert abs(used - mine) < 0.2 * mine
    assert total == psutil.virtual_memory().total


def test_a_gpus_peak_is_the_mappers_for_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = FoundGpu(
        name="NVIDIA H100 80GB HBM3",
        memory=80e9,
        capability=(9, 0),
        multiprocessors=132,
        clock=1.98e9,
        memory_bandwidth=3.35e12,
    )
    monkeypatch.setattr(device, "gpus_here", lambda: [found])
    assert device.peak_flops(torch.bfloat16) == 989.4e12
    assert device.peak_flops(torch.float32) == pytest.approx(66.9e12)
    monkeypatch.setattr(device, "gpus_here", list)
    assert device.peak_flops(torch.bfloat16) == 0.0
