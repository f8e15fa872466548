"""`python -m tests.real_size.checkpoint [NAME]`: a checkpoint of a case's actor: what a rank writes, and reads again.

The product's code plans both on fake tensors; the files of all ranks have headers only.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rlhf_trainer.hybrid_engine import hybrid_engine
from rlhf_trainer.stored_tensors import LocalFile, saved_by_ranks
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training import saving
from rlhf_trainer.training.sharding import held_piece
from rlhf_trainer.workers import rollout
from tests.real_size.cases import CASES
from tests.real_size.live_bytes import LiveBytes
from tests.real_size.step import GPUS_OF_NODE, Case, _generator, _marked, prepared, worker_of

NAME = "llama-3-70b-64"
Places = Mapping[str, TensorSlice]


class HeaderFile(LocalFile):
    """A rank's file of which only the header is there."""

    def __init__(self, places: Places) -> None:
        self._places = places
        offsets = {name: {SAVED_OFFSETS_KEY: place.starts} for name, place in places.items()}
        self._texts = {CUSTOM_METADATA_KEY: json.dumps(offsets)}

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:  # noqa: ARG002
        return torch.float32

    def metadata(self) -> dict[str, str]:
        return self._texts

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return torch.empty(()).expand(self._places[name].shape)[index]


def place_of(tensor: Tensor, at: Mapping[str, int]) -> TensorSlice:
    """What the rank at these indices of the mesh holds (`held_piece`, for the others)."""
    place = TensorSlice.whole(tuple(tensor.shape))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        cuts = zip(mesh.shape, map(at.__getitem__, mesh.mesh_dim_names or ()), tensor.placements, strict=True)
        for size, index, placement in reversed(list(cuts)):
            if isinstance(placement, Shard | _StridedShard):
                place = place.chunk(placement.dim, index, size)
    return place


def count(case: Case, folder: Path) -> dict[str, Any]:
    """Files and bytes of a checkpoint of the actor, collectives, and seconds of planning on this machine."""
    from tests.real_size.world import rank_of_world  # it makes a device, which a process on a real one lacks

    live, written = LiveBytes(), []
    job, folders = prepared(case, folder)
    with (
        rank_of_world(case.ranks, live, rank=case.rank),
        _marked(live),
        patch.object(rollout, "GenerationEngine", _generator(live)),
        patch.object(hybrid_engine, "_nodes", lambda: [rank // GPUS_OF_NODE for rank in range(case.ranks)]),
        patch.object(saving, "write_piece", lambda _path, pieces, _type: written.append(pieces)),
        patch.object(saving, "save_file", lambda *_: None),
    ):
        state = worker_of("actor", case, job, folders, live).trainer.state
        tensors = state._tensors()
        began = time.perf_counter()
        with live.measured("save"):
            state.begin_save(folder, then=lambda: None, copies=False)
        saved = time.perf_counter() - began
        meshes = [each.device_mesh for each in tensors.values() if isinstance(each, DTensor)]
        mesh = max(meshes, key=lambda each: each.ndim)
        ranks = [dict(zip(mesh.mesh_dim_names or (), at, strict=True)) for at in product(*map(range, mesh.shape))]
        places = [{name: place_of(each, rank) for name, each in tensors.items()} for rank in ranks]
        files = [HeaderFile({name: place for name, place in of.items() if place.numel}) for of in places]
        began = time.perf_counter()
        with live.measured("load"):
            stored = saved_by_ranks(files)
            wanted = {name: held_piece(each)[1] for name, each in tensors.items()}
            read = {name: [part for part, _ in stored[name].parts(wanted[name])] for name in tensors}
        loaded = time.perf_counter() - began
    size = sum(place.numel for _, place in written[0].values()) * 4
    assert {name: sum(part.numel for part in parts) for name, parts in read.items()} == {
        name: place.numel for name, place in wanted.items()
    }
    return {
        "files": 2 * case.ranks,
        "gb_of_rank": round(size / 1e9, 2),
        "gb_of_all": round(sum(place.numel for of in files for place in of._places.values()) * 4 / 1e9, 1),
        "gb_read_by_rank": round(sum(place.numel for place in wanted.values()) * 4 / 1e9, 2),
        "collectives": {name: sum(live.phases[name].collectives.values()) for name in ("save", "load")},
        "seconds": {"save": round(saved, 2), "load": round(loaded, 2)},
    }


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        print(json.dumps(count(CASES[sys.argv[1] if len(sys.argv) > 1 else NAME], Path(folder))))


if __name__ == "__main__":
    main()
