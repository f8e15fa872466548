"""A checkpoint in an object store is restored by ranges of bytes: a rank asks for its own and puts none on a disk."""

import uuid
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer import stored_tensors
from rlhf_trainer.checkpoint import UploadFolder
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.storage import open_storage
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.loading import load_scorer
from rlhf_trainer.training.sharding import held_piece, shard
from rlhf_trainer.training.trainer import Trainer
from tests.trainer.ranks import run_kept_ranks, run_ranks
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.weights import weights_on_first_rank

CUT, FSDP, ALONE = ParallelSizes(data=1, pipeline=2, tensor=2), ParallelSizes(data=4), ParallelSizes(data=1)


def trainer_of(folder: str, layout: ParallelSizes) -> Trainer:
    model = load_scorer(folder, seed=0, trust_remote_code=False, revision=None, path="models.critic")
    return Trainer(
        shard(model, layout, compute_dtype=torch.float32, recompute_activations=False),
        token_budget=64,
        optimizer=Optimizer(),
        total_steps=1,
        max_skipped_updates=0,
        path="models.critic",
        role="critic",
        offload="None",
        attention="Auto",
    )


def save(folder: str, uri: str, layout: ParallelSizes) -> dict[str, Tensor]:
    trainer = trainer_of(folder, layout)
    upload = UploadFolder(uri)
    trainer.state.begin_save(upload.folder, then=upload.upload, copies=True)
    trainer.state.end_save()
    return weights_on_first_rank(trainer.model)


def restore(
    folder: str, uri: str, temporary: str, *layouts: ParallelSizes
) -> tuple[dict[str, Tensor], dict[ParallelSizes, tuple[int, int]]]:
    """(whole weights, layout -> bytes that this rank asked for and holds)."""
    asked = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", temporary)
        read = stored_tensors.RemoteFile._bytes
        for layout in layouts:
            trainer = trainer_of(folder, layout)
            sizes: list[int] = []

            def counted(file: stored_tensors.RemoteFile, start: int, stop: int, sizes: list[int] = sizes) -> bytes:
                sizes.append(stop - start)
                return read(file, start, stop)

            patch.setattr(stored_tensors.RemoteFile, "_bytes", counted)
            with torch.no_grad():
                for parameter in trainer.model.module.parameters():
                    parameter.zero_()
            trainer.state.load(uri)
            held = sum(held_piece(each)[0].nbytes for each in trainer.model.module.parameters())
            asked[layout] = sum(sizes), held
    return weights_on_first_rank(trainer.model), asked


@pytest.mark.slow
def test_a_rank_downloads_what_it_holds(s3: str, tmp_path: Path) -> None:
    folder, uri = save_tiny(tmp_path / "model", seed=1, config=divisible_config()), f"{s3}/{uuid.uuid4()}/actor"
    saved = run_ranks(4, save, folder, uri, CUT)[0]
    (tmp_path / "temporary").mkdir()
    ranks = run_ranks(4, restore, folder, uri, str(tmp_path / "temporary"), CUT, FSDP)
    assert saved.keys() == ranks[0][0].keys()
    assert all(torch.equal(ranks[0][0][name], weight) for name, weight in saved.items())
    files, path = open_storage(uri)
    written = [file for file in files.ls(path, detail=False) if file.endswith(".safetensors")]
    headers = sum(8 + int.from_bytes(files.cat_file(file, end=8), "little") for file in written)
    everything = files.du(path)
    for _, asked in ranks:
        for layout, (downloaded, held) in asked.items():
            weights_and_moments = 3 * held + 4 * len(saved)
            # rows are whole in a range, also where a rank holds columns of them
            assert downloaded <= headers + weights_and_moments * (1 if layout == CUT else 2), layout
            assert downloaded < 0.75 * everything
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize(
    ("starts", "stops"),
    [((0, 0, 0), (5, 4, 3)), ((1, 0, 0), (3, 4, 3)), ((0, 1, 0), (5, 3, 3)), ((2, 1, 1), (4, 3, 2))],
)
def test_rows_and_columns_come_as_they_were_written(
    is_remote: bool, starts: tuple[int, ...], stops: tuple[int, ...], tmp_path: Path
) -> None:
    path, whole = tmp_path / "piece.safetensors", TensorSlice.whole((5, 4, 3))
    tensor, part = torch.arange(60.0).reshape(5, 4, 3), TensorSlice(starts, stops)
    stored_tensors.write_piece(path, {"before": (tensor + 1, whole), "weight": (tensor, whole)}, torch.float32)
    remote, local = stored_tensors.RemoteFile(LocalFileSystem(), str(path)), stored_tensors.LocalFile(lambda: str(path))
    file = remote if is_remote else local
    read = torch.zeros(part.shape)
    stored_tensors.read_into(read, part, stored_tensors.StoredTensor([stored_tensors.Piece(file, "weight")]))
    assert torch.equal(read, tensor[part.within(whole)])


def test_a_stack_out_of_the_matrices_of_a_file_gives_them_back(tmp_path: Path) -> None:
    path, matrix, sizes = tmp_path / "matrices.safetensors", torch.arange(12.0).reshape(4, 3), TensorSlice.whole((4, 3))
    stored_tensors.write_piece(path, {str(row): (matrix + row, sizes) for row in range(2)}, torch.float32)
    file = stored_tensors.LocalFile(lambda: str(path))
    pieces = [stored_tensors.Piece(file, str(row), sizes.on_layer(row)) for row in range(2)]
    layer = stored_tensors.Layer(stored_tensors.StoredTensor(pieces), sizes.on_layer(1))
    read = torch.zeros(4, 3)
    stored_tensors.read_into(read, sizes, layer)
    assert torch.equal(read, matrix + 1)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_flipped_bit_is_found_where_a_piece_is_read(is_remote: bool, tmp_path: Path) -> None:
    path, whole = tmp_path / "piece.safetensors", TensorSlice.whole((5, 4))
    stored_tensors.write_piece(path, {"weight": (torch.ones(5, 4), whole)}, torch.float32)
    written = bytearray(path.read_bytes())
    written[-7] ^= 4
    path.write_bytes(written)
    remote, local = stored_tensors.RemoteFile(LocalFileSystem(), str(path)), stored_tensors.LocalFile(lambda: str(path))
    stored = stored_tensors.StoredTensor([stored_tensors.Piece(remote if is_remote else local, "weight")])
    with pytest.raises(NumericsError, match="weight is not what was written"):
        stored_tensors.read_into(torch.zeros(5, 4), whole, stored)


def test_a_checkpoint_that_is_cut_off_is_named(s3: str, tmp_path: Path) -> None:
    folder, uri = save_tiny(tmp_path / "model", seed=1, config=divisible_config()), f"{s3}/{uuid.uuid4()}/actor"
    run_kept_ranks(1, save, folder, uri, ALONE)
    files, path = open_storage(uri)
    file = max(file for file in files.ls(path, detail=False) if file.endswith(".safetensors"))
    files.pipe_file(file, files.cat_file(file)[:-100])
    with pytest.raises(AssertionError, match=rf"EnvironmentProblem: {uri}: .*the file is cut off"):
        run_kept_ranks(1, restore, folder, uri, str(tmp_path), ALONE)
