"""Models are made on the meta device; a rank reads its slices, and never holds more than its shards and one chunk."""

import copy
import json
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_api.spec.job_spec import Optimizer
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer import stored_tensors
from rlhf_trainer.errors import DataError
from rlhf_trainer.stored_tensors import write_piece
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.loading import load_language_model, load_scorer, load_tokenizer
from rlhf_trainer.training.optimizer import ShardedAdamW
from rlhf_trainer.training.saving import TrainerState, _put_together, save_model
from rlhf_trainer.training.sharding import ShardedModel, held_piece, named_parameters, shard
from tests.real_size.live_bytes import LiveBytes
from tests.trainer.families import FAMILIES
from tests.trainer.ranks import run_ranks
from tests.trainer.tiny import EXAMPLE_MODEL, divisible_config, save_tiny
from tests.trainer.weights import weights_by_pieces, weights_on_first_rank

LAYOUTS = [
    ParallelSizes(data=1, pipeline=2, tensor=2),
    ParallelSizes(data=4),
    ParallelSizes(data=4, replicas=2),
    ParallelSizes(data=2, tensor=2),
]
OF_EXPERTS = [
    ParallelSizes(data=4, expert=2),
    ParallelSizes(data=4, replicas=2, expert=2),
    ParallelSizes(data=2, tensor=2, expert=4),
    ParallelSizes(data=2, tensor=2),
]
CHUNK = 8 * 1024
SMALL = 8 * 1024
"""Norms, rotary frequencies, scalars."""


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that were alive at once, without files that are mapped into memory.

    `read` counts the elements that were read from files.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = 0
        self.mapped: list[Tensor] = []
        self._live = LiveBytes()
        self._patch = pytest.MonkeyPatch()

    @property
    def peak(self) -> int:
        return self._live.phase.host_peak

    def __enter__(self) -> Self:
        read_file = stored_tensors.LocalFile.read

        def read(file: stored_tensors.LocalFile, name: str, index: tuple[slice, ...]) -> Tensor:
            with _disable_current_modes():
                values = read_file(file, name, index)
            assert values.nbytes <= stored_tensors.CHUNK_BYTES
            self.mapped.append(values)
            self.read += values.numel()
            return values

        self._patch.setattr(stored_tensors.LocalFile, "read", read)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it becomes operations on shards
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter((args, result)):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor | FakeTensor) and not tensor.is_meta:
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in self.mapped}:
            self._live.seen(tensor)


def held_bytes(model: ShardedModel) -> int:
    return sum(held_piece(parameter.detach())[0].nbytes for _, parameter in named_parameters(model))


def load(folder: str, kind: str, layout: ParallelSizes | None, *, frozen: bool = False) -> ShardedModel:
    options: dict[str, Any] = {"seed": 5, "trust_remote_code": False, "revision": None}
    model = (
        load_language_model(folder, may_initialise=True, **options)
        if kind == "language model"
        else load_scorer(folder, path="spec.models.critic", **options)
    )
    if frozen:
        model.requires_grad_(False)
    return shard(model, layout, compute_dtype=torch.bfloat16, recompute_activations=True)


Counted = tuple[dict[str, Tensor], dict[str, int]]


def load_everywhere(folder: str, kind: str, frozen: bool, layouts: list[ParallelSizes]) -> list[Counted]:
    """For each layout: the whole weights (rank 0), and what this rank held, read and had at once."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensors, "CHUNK_BYTES", CHUNK)
        for layout in layouts:
            with Peak() as memory:
                model = load(folder, kind, layout, frozen=frozen)
            numbers = {"held": held_bytes(model), "peak": memory.peak, "read": memory.read}
            sizes = [held_piece(parameter.detach())[0] for _, parameter in named_parameters(model)]
            numbers["elements"] = sum(tensor.numel() for tensor in sizes)
            numbers["largest"] = max(tensor.nbytes for tensor in sizes)
            seen.append((weights_by_pieces(model), numbers))
    return seen


def save_sharded(folder: Path, *, tied: bool, classifier: bool = False, mixture: bool = False) -> str:
    """bfloat16 weights in several files with an index; a vocabulary that no number of ranks divides."""
    config = copy.deepcopy(FAMILIES["Qwen3-MoE"]) if mixture else divisible_config(tied=tied)
    config.vocab_size, config.num_labels = 451, 1
    save_tiny(folder, seed=1, config=config, labels=1 if classifier else None)
    model = (AutoModelForSequenceClassification if classifier else AutoModelForCausalLM).from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "tied", "classifier", "frozen", "layouts"),
    [
        pytest.param("language model", True, False, False, LAYOUTS, id="tied, trained"),
        pytest.param("language model", False, False, True, LAYOUTS, id="untied, frozen", marks=pytest.mark.slow),
        pytest.param("language model", True, False, False, OF_EXPERTS, id="mixture"),
        pytest.param("scorer", True, False, False, LAYOUTS, id="critic from a language model", marks=pytest.mark.slow),
        pytest.param("scorer", False, True, True, LAYOUTS, id="frozen reward", marks=pytest.mark.slow),
    ],
)
def test_no_rank_reads_or_holds_more_than_its_shards(
    kind: str, tied: bool, classifier: bool, frozen: bool, layouts: list[ParallelSizes], tmp_path: Path
) -> None:
    folder = save_sharded(tmp_path / "model", tied=tied, classifier=classifier, mixture=layouts is OF_EXPERTS)
    torch.manual_seed(5)
    expected: Any = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if kind == "language model"
        else AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    )
    ranks = run_ranks(4, load_everywhere, folder, kind, frozen, layouts)
    for place, layout in enumerate(layouts):
        weights, _ = ranks[0][place]
        assert weights.keys() == dict(expected.named_parameters()).keys()
        for name, whole in expected.named_parameters():
            assert weights[name].dtype == (torch.bfloat16 if frozen else torch.float32)
            assert torch.equal(weights[name].float(), whole.to(weights[name].dtype).float()), (layout, name)
        for rank in range(4):
            _, numbers = ranks[rank][place]
            assert numbers["read"] <= numbers["elements"]
            room = numbers["largest"] + CHUNK * 3 + SMALL  # FSDP copies a shard that it pads
            assert numbers["peak"] <= numbers["held"] + room, (layout, rank, numbers)


def save_everywhere(folder: str, output: str, layout: ParallelSizes) -> tuple[int, int, int, bool]:
    """(bytes of this rank's shards, the most that was alive while the model was saved, elements of the pieces that it
    wrote, whether it still had pieces open when it was done with them)."""
    written, is_open, memory = 0, False, Peak()

    def write(path: Path, pieces: Any, dtype: torch.dtype) -> None:
        nonlocal written
        written = sum(tensor.numel() for tensor, _ in pieces.values())
        write_piece(path, pieces, dtype)

    def put_together(pieces: Path, *arguments: Any) -> None:
        nonlocal is_open
        _put_together(pieces, *arguments)
        memory.mapped.clear()
        is_open = str(pieces) in Path("/proc/self/maps").read_text()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensors, "CHUNK_BYTES", CHUNK)
        patch.setattr("rlhf_trainer.training.saving.write_piece", write)
        patch.setattr("rlhf_trainer.training.saving._put_together", put_together)
        patch.setattr("rlhf_trainer.training.saving.FILE_SIZE", "100KB")
        model = load(folder, "language model", layout)
        tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
        with memory:
            save_model(model, tokenizer, Path(output))
    return held_bytes(model), memory.peak, written, is_open


@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        (True, ParallelSizes(data=1, pipeline=2, tensor=2)),
        pytest.param(False, ParallelSizes(data=4, replicas=2), marks=pytest.mark.slow),
        (True, ParallelSizes(data=3, tensor=2)),
    ],
    ids=["stages of tensor-parallel ranks, tied", "replicas, untied", "a vocabulary that 2 x 3 ranks cut unevenly"],
)
def test_every_rank_writes_its_part_in_the_type_of_the_source(
    tied: bool, layout: ParallelSizes, tmp_path: Path
) -> None:
    folder, output = save_sharded(tmp_path / "before", tied=tied), tmp_path / "after"
    saved = run_ranks(layout.world_size, save_everywhere, folder, str(output), layout)
    for held, peak, _, is_open in saved:
        assert peak <= held + CHUNK * 3 + SMALL
        assert not is_open, "NFS deletes no open file"
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in output.glob("*") if path.is_dir()} == set()
    assert len(list(output.glob("model-*-of-*.safetensors"))) > 2
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, output))
    assert {weight.dtype for weight in after.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    if layout.replicas > 1:
        assert sum(written for _, _, written, _ in saved) == sum(weight.numel() for weight in after.parameters())


def checkpoint_everywhere(folder: str, output: str, layout: ParallelSizes) -> dict[bool, tuple[int, int]]:
    """Whether the state was copied -> (bytes of this rank's weights and moments, the most that was alive meanwhile)."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensors, "CHUNK_BYTES", CHUNK)
        model = load(folder, "language model", layout)
        state = TrainerState(model, ShardedAdamW(model.module.parameters(), Optimizer()))
        for copies in (True, False):
            folder_of_rank = Path(output) / str(copies)
            with Peak() as memory:
                state.begin_save(folder_of_rank, then=lambda: None, copies=copies)
            if not copies:
                assert list(folder_of_rank.glob("shard-*.safetensors")), "it is written when the call returns"
            state.end_save()
            seen[copies] = 3 * held_bytes(model), memory.peak
    return seen


def test_a_checkpoint_that_is_waited_for_holds_no_second_state(tmp_path: Path) -> None:
    folder, layout = save_sharded(tmp_path / "model", tied=True), ParallelSizes(data=2)
    for seen in run_ranks(layout.world_size, checkpoint_everywhere, folder, str(tmp_path), layout):
        (held, copied), (_, waited) = seen[True], seen[False]
        assert copied >= 2 * held, "this counts what is copied"
        assert waited <= held + CHUNK * 3 + SMALL
    for rank in range(layout.world_size):
        file = f"shard-{rank}.safetensors"
        assert (tmp_path / "True" / file).read_bytes() == (tmp_path / "False" / file).read_bytes()


def draw(folder: str, layout: ParallelSizes) -> tuple[dict[str, Tensor], Tensor, int, int]:
    with Peak() as memory:
        model = load(folder, "language model", layout)
    return weights_on_first_rank(model), torch.rand(1), held_bytes(model), memory.peak


def test_a_model_made_from_the_seed_is_the_same_on_any_layout() -> None:
    seen = run_ranks(4, draw, str(EXAMPLE_MODEL), LAYOUTS[0])
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLE_MODEL))
    drawn = torch.rand(1)
    assert all(torch.equal(seen[0][0][name], weight) for name, weight in expected.named_parameters())
    largest = max(weight.nbytes for weight in expected.parameters())
    for _, then, held, peak in seen:
        assert then == drawn
        assert peak <= held + 2 * largest + SMALL


def test_weights_saved_without_the_head_are_found_by_name(tmp_path: Path) -> None:
    """As transformers' base model saves them: `layers.0...` is `model.layers.0...`."""
    base = AutoModel.from_pretrained(save_tiny(tmp_path / "model", seed=1))
    base.save_pretrained(tmp_path / "base")
    found = load_language_model(str(tmp_path / "base"), seed=0, trust_remote_code=False, revision=None).weights
    assert found is not None
    for name, weight in base.named_parameters():
        ((_, values),) = found[f"model.{name}"].parts(TensorSlice.whole(tuple(weight.shape)))
        assert torch.equal(values, weight), name


def damaged(folder: Path, how: str) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    if how == "missing file":
        file.unlink()
    elif how == "cut in half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "missing tensor":
        file.rename(folder / "elsewhere")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = {name: at for name, at in index["weight_map"].items() if at != file.name}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "other shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 460}))
    else:
        (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing file", r"index\.json: names files that are not in the folder: model-00002-of-.*safetensors"),
        ("cut in half", r"cannot be read as a model folder: .*model-00002-of-.*safetensors: .*"),
        ("missing tensor", r"model: the weights lack model\.layers\.[0-9.a-z_]+"),
        ("other shape", r"embed_tokens\.weight is \[451, 64\] in the weights, and \[460, 64\] by config\.json"),
        ("broken index", r"model: cannot be read as a model folder"),
    ],
)
def test_a_damaged_folder_is_one_sentence(how: str, words: str, tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "model", tied=True)
    damaged(Path(folder), how)
    with pytest.raises(DataError, match=words) as caught:
        load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    assert "\n" not in str(caught.value)
