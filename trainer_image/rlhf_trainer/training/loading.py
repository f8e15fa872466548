"""Tokenizer, config and weights of a model folder; this module locates weights, `shard` reads them."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.loading_report import LoadStateDictInfo

from rlhf_trainer.chat import EndTokens, end_tokens
from rlhf_trainer.errors import ConfigError, DataError
from rlhf_trainer.stored_tensors import Layer, LocalFile, Piece, StoredTensor, TensorSource
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.drawing import Drawing, OnMeta
from rlhf_trainer.training.models import LanguageModel, Scorer, kept_buffers

Shape = tuple[int, ...]
WEIGHT_FILES = "*.safetensors"
PICKLED_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Name patterns of pickled weights, which can run code when they are loaded; the trainer never loads them."""
OTHER_WEIGHTS = ("*.gguf", "*.h5", "*.msgpack", "*.incomplete", "*.part", "*.aria2")
"""Name patterns of weights in other forms, and of downloads that stopped."""
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json", "tokenization_*.py")
HEADS = ("score.", "value_head.", "v_head.", "reward_head.", "score_head.", "rm_head.", "classifier.")
"""First parts of the names of trained heads: those of transformers and verl, OpenRLHF, TRL and others."""


def load_tokenizer(folder: str, *, trust_remote_code: bool, revision: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; DataError for a folder without one, or without an end-of-text token."""
    if Path(folder).is_dir() and not any(list(Path(folder).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise DataError(f"{folder}: the folder has no tokenizer (tokenizer.json)")
    with _one_sentence(folder):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, revision=revision
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"{folder}: the tokenizer has no end-of-text token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_end_tokens(folder: str, tokenizer: PreTrainedTokenizerBase, *, revision: str | None) -> EndTokens:
    """Return a model's end tokens; generation_config.json lists some, or else config.json, as for `generate`."""
    find = partial(cached_file, folder, revision=revision, _raise_exceptions_for_missing_entries=False)
    with _one_sentence(folder):
        files = filter(None, map(find, ("generation_config.json", "config.json")))
        listed = [json.loads(Path(file).read_text()).get("eos_token_id") for file in files]
    first: Sequence[int] | int = next((each for each in listed if each is not None), ())
    return end_tokens(tokenizer, [first] if isinstance(first, int) else first)


def load_config(folder: str, *, trust_remote_code: bool, revision: str | None) -> PreTrainedConfig:
    with _one_sentence(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, revision=revision)


def has_weights(folder: str) -> bool:
    """Whether a local model folder holds weights; True on the hub. DataError for other formats and missing shards."""
    path = Path(folder)
    if not path.is_dir() or (path / SAFE_WEIGHTS_NAME).is_file():
        return True
    is_there = any(path.glob(WEIGHT_FILES))
    for index in path.glob(SAFE_WEIGHTS_INDEX_NAME if is_there else "*.index.json"):
        _require_shards(index)
    for file in (file for pattern in (*PICKLED_WEIGHTS, *OTHER_WEIGHTS) for file in path.glob(pattern) if not is_there):
        if any(map(file.match, OTHER_WEIGHTS)):
            raise DataError(f"{file}: is no file of weights that is read; expected {WEIGHT_FILES}")
        raise DataError(f"{file}: pickled weights are never opened, for they can run code; save as safetensors")
    return is_there


def _require_shards(index: Path) -> None:
    """Raise DataError for an index of weights that names no files, or files that are absent."""
    with _one_sentence(str(index.parent)):
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
    if not named:
        raise DataError(f"{index}: names no weights")
    if lacking := sorted(name for name in named if not (index.parent / name).is_file()):
        raise DataError(f"{index}: names files that are not in the folder: {', '.join(lacking)}")


def try_config(folder: str, *, scores: bool, trust_remote_code: bool, revision: str | None) -> LanguageModel | Scorer:
    """Make a model from config.json alone on the meta device; raises the errors of loading, except those of weights."""
    config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
    factory = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with OnMeta():
        model = _made(factory, folder, config, trust_remote_code, revision)
    if scores:
        _require_score_head(model, folder)
    return Scorer(model) if scores else LanguageModel(model)


def load_language_model(
    folder: str, *, seed: int, trust_remote_code: bool, revision: str | None, may_initialise: bool = False
) -> LanguageModel:
    """Make a causal language model, float32 on the meta device; `shard` fills the shards of a rank.

    A folder without weights is initialised from `seed` if `may_initialise`, and is a DataError otherwise.
    ConfigError for a model whose class does not compute its buffers when it is made.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
    torch.manual_seed(seed)
    if not has_weights(folder):
        if not may_initialise:
            raise DataError(f"{folder}: the folder has no weights (*.safetensors)")
        source_dtype = config.dtype or torch.float32
        with Drawing() as drawing:
            model = _made(AutoModelForCausalLM, folder, config, trust_remote_code, revision)
        model.config.dtype = source_dtype
        return LanguageModel(model, {name: drawing.of(w) for name, w in model.named_parameters() if w.is_meta})
    model, weights = _unread(AutoModelForCausalLM, folder, config, trust_remote_code, revision)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder, revision=revision)
    _require_all(model, weights, folder)
    return LanguageModel(model, weights)


def load_scorer(
    folder: str,
    *,
    seed: int,
    trust_remote_code: bool,
    revision: str | None,
    path: str,
    may_add_head: bool = True,
    label: int | None = None,
) -> Scorer:
    """Make a scorer, float32 on the meta device, of a reward model or, with a head drawn from `seed`, a language model.

    `shard` fills the shards of a rank. The weights show which of the two the model is. label: index of the score among
    several outputs of a frozen model. Raises ConfigError, naming `path` in the manifest, for several outputs without a
    label, and for a language model if not `may_add_head`; DataError for a folder without weights.
    """
    if not has_weights(folder):
        raise DataError(f"{folder}: the folder has no weights (*.safetensors)")
    config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
    head = _stored_head(folder, revision)
    if head:
        labels = config.num_labels = head.shape[0]
        _require_label(labels, label, path, f"{folder} has {labels} labels", trains=may_add_head)
    elif any("SequenceClassification" in name for name in config.architectures or []):
        raise DataError(f"{folder}: the weights lack score.weight, which the class in config.json has")
    elif not may_add_head:
        what = "is a language model without a trained score head; train a RewardModel first"
        raise ConfigError(f"{path}: {folder} {what}")
    else:
        config.num_labels = 1
    torch.manual_seed(seed)
    model, weights = _unread(AutoModelForSequenceClassification, folder, config, trust_remote_code, revision)
    _require_score_head(model, path)
    drawn = set() if head else {f"score.{name}" for name, _ in model.score.named_parameters()}
    if head:
        weights["score.weight"] = head
    else:
        model._init_weights(model.score.to_empty(device="cpu"))  # noqa: SLF001 there is no public name
    _require_all(model, weights, folder, drawn=drawn)
    return Scorer(model, weights, label=label or 0)


def _stored_head(folder: str, revision: str | None) -> StoredTensor | None:
    """Return the matrix [labels, hidden] of a trained head in a model's files, whatever class config.json names.

    None for a language model. ConfigError for a head that is more than a matrix.
    """
    with _one_sentence(folder):
        names = _stored_names(partial(cached_file, folder, revision=revision), folder)
        found = {name: StoredTensor([Piece(file, name)]) for file, name in names if name.startswith(HEADS)}
        shapes = [f"{name} {list(tensor.shape)}" for name, tensor in found.items()]
    if len(found) > 1 or any(len(tensor.shape) != 2 for tensor in found.values()):
        raise ConfigError(f"{folder}: its score head is {', '.join(shapes)}; only one matrix [labels, hidden] is read")
    return next(iter(found.values()), None)


def _require_label(count: int, label: int | None, path: str, found: str, *, trains: bool) -> None:
    if trains and count != 1:
        raise ConfigError(f"{path}: {found}; one that is trained has 1")
    if label is None and count != 1:
        raise ConfigError(f"{path}: {found}; say by label which of them is the score, from 0 to {count - 1}")
    if label is not None and label >= count:
        raise ConfigError(f"{path}.label: is {label}, but {found}, from 0 to {count - 1}")


def _require_score_head(model: Any, path: str) -> None:
    if not hasattr(model, "score"):
        kind = type(model).__name__
        raise ConfigError(f"{path}: {kind} has no `score` head, so it cannot be a reward model or critic")


def _made(factory: Any, folder: str, config: PreTrainedConfig, trust_remote_code: bool, revision: str | None) -> Any:
    code = {"code_revision": revision} if trust_remote_code and hasattr(config, "auto_map") else {}
    if code:
        factory._model_mapping._extra_content.pop(type(config), None)  # noqa: SLF001 from_config fails if it is there
    with _one_sentence(folder):
        model = factory.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code, **code)
    if computed := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ConfigError(f"{folder}: {type(model).__name__} does not compute its buffer {computed[0]} when it is made")
    return model


def _unread(
    factory: Any, folder: str, config: PreTrainedConfig, trust_remote_code: bool, revision: str | None
) -> tuple[Any, dict[str, StoredTensor]]:
    """Return a model on the meta device and its stored parameters, located but unread; its config has their type."""
    source_dtype = config.dtype
    if getattr(config, "quantization_config", None):
        raise DataError(
            f"{folder}: its weights are quantised, which is not supported, nor with an adapter (QLoRA); "
            "take the model that they were made of"
        )
    with OnMeta():
        model = _made(factory, folder, config, trust_remote_code, revision)
    with _one_sentence(folder):
        stored = stored_weights(model, folder, revision)
        model.config.dtype = source_dtype or next(iter(stored.values())).dtype
    return model, stored


def stored_model(
    folder: str, *, scores: bool, trust_remote_code: bool, revision: str | None
) -> dict[str, StoredTensor]:
    """Return a model's stored parameters by name, without a head that a scorer adds; DataError if there are none."""
    config = load_config(folder, trust_remote_code=trust_remote_code, revision=revision)
    if scores:
        config.num_labels = 1
    factory = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model, weights = _unread(factory, folder, config, trust_remote_code, revision)
    names = chain(dict(model.named_parameters()), kept_buffers(model))
    return {name: weights[name] for name in names if name in weights}


def stored_weights(model: PreTrainedModel, folder: str, revision: str | None) -> dict[str, StoredTensor]:
    """Return the stored parameters of a model in the files of its folder, by their names in the model.

    Local files are opened at once, so that every rank sees a damaged one; hub files are opened when needed.
    OSError or SafetensorError: a file is missing or damaged. ValueError: a parameter is more than a stack of tensors.
    """
    find = partial(cached_file, folder, revision=revision)
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    expected = model.state_dict()
    pieces: dict[str, list[Piece]] = {}
    for file, name in _stored_names(find, folder):
        own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        place = None
        if own in expected and pattern is not None:
            place = place_in_stack(converters, pattern, name, tuple(expected[own].shape))
            if place is None:
                raise ValueError(f"{type(model).__name__} makes {own} of other tensors, which is not supported")
        pieces.setdefault(own, []).append(Piece(file, name, place))
    stored = {own: StoredTensor(of_own) for own, of_own in pieces.items()}
    for head, embedding in model.all_tied_weights_keys.items():
        if head in stored:
            stored.setdefault(embedding, stored[head])
    return stored


def _stored_names(find: Callable[..., Any], folder: str) -> Iterator[tuple[LocalFile, str]]:
    """Yield (file, name) of each stored tensor, by the files of a local folder or the index of a model on the hub."""
    index = find(SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    names_by_file: dict[str, list[str]] = {}
    if index is None or Path(folder, SAFE_WEIGHTS_NAME).is_file():
        names_by_file[SAFE_WEIGHTS_NAME] = []
    else:
        for name, file_name in json.loads(Path(index).read_text()).get("weight_map", {}).items():
            names_by_file.setdefault(file_name, []).append(name)
    for file_name, names in names_by_file.items():
        file = LocalFile(partial(find, file_name))
        in_file = file.names() if not names or Path(folder).is_dir() else names
        yield from ((file, name) for name in in_file)


def unread_tensors(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of stored tensors that no parameter takes, without those that transformers ignores too."""
    own = {*model.state_dict(), *dict(model.named_buffers())}
    found = LoadStateDictInfo(set(), set(names) - own, set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(found)  # noqa: SLF001 there is no public name
    known = ("lm_head.", *HEADS) if hasattr(model, "score") else ()
    return sorted(name for name in found.unexpected_keys if not name.startswith(known))


def _require_all(
    model: PreTrainedModel, weights: Mapping[str, StoredTensor], folder: str, *, drawn: Collection[str] = ()
) -> None:
    """Raise DataError for a missing parameter, one of another shape in a local file, and a stored buffer."""
    kept = kept_buffers(model)
    if buffers := (dict(model.named_buffers()).keys() - kept.keys()) & model.state_dict().keys() & weights.keys():
        raise DataError(f"{folder}: {min(buffers)} is no parameter, and buffers with values of their own are not read")
    for name, parameter in chain(model.named_parameters(), kept.items()):
        if name in drawn:
            continue
        if name not in weights:
            raise DataError(f"{folder}: the weights lack {name}")
        if Path(folder).is_dir():
            _require_shape(name, weights[name], tuple(parameter.shape), folder)


def _require_shape(name: str, weights: StoredTensor, shape: tuple[int, ...], folder: str) -> None:
    for piece in weights.pieces:
        stored, own = piece.file.shape(piece.name), piece.place.shape[1:] if piece.place else shape
        if stored != own:
            what = piece.name if piece.place else name
            raise DataError(f"{folder}: {what} is {list(stored)} in the weights, and {list(own)} by config.json")
    if lacking := prod(shape) - sum(piece.held.numel for piece in weights.pieces):
        raise DataError(f"{folder}: the weights lack {lacking:,} elements of {name}")


@contextmanager
def _one_sentence(folder: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(f"{folder}: brings Python code of its own, which runs only with trustRemoteCode") from error
        if Path(folder).is_dir() and not Path(folder, CONFIG_NAME).is_file():
            raise DataError(f"{folder}: the folder has no {CONFIG_NAME}") from error
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{folder}: cannot be read as a model folder: {reason}") from error


def place_in_stack(converters: Sequence[WeightConverter], pattern: str, name: str, stack: Shape) -> TensorSlice | None:
    """Return the slice of a stack [experts, rows, columns] that a file's tensor fills; None without a stack.

    pattern: the source pattern of a converter that the tensor's name matches, with `*` for the index of the expert.
    The parts of one expert lie one below the other, in equal heights.
    """
    (converter,) = (each for each in converters if pattern in each.source_patterns)
    if not _stacks(converter) or len(stack) != 3:
        return None
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    assert found, "the converter chose the pattern by this name"
    return _place(int(found[1]), converter.source_patterns, pattern, stack)


def as_stored(model_type: str, sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Convert a model's parameters to the tensors of its files, by name in the files; stacks of experts are cut."""
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    converters = [each for each in conversions if isinstance(each, WeightConverter) and _stacks(each)]
    if not converters:
        return dict(sources)
    renamings = [each.reverse_transform() for each in conversions if isinstance(each, WeightRenaming)]
    found: dict[str, TensorSource] = {}
    for parameter, source in sources.items():
        for name, tensor in _unstacked(converters, parameter, source):
            for renaming in renamings:
                name = renaming.rename_source_key(name)[0]  # noqa: PLW2901 each renames the result of the one before
            found[name] = tensor
    return found


def _unstacked(
    converters: Sequence[WeightConverter], name: str, source: TensorSource
) -> Iterator[tuple[str, TensorSource]]:
    converter = next((each for each in converters if name.endswith(each.target_patterns[0])), None)
    if converter is None:
        yield name, source
        return
    (target,), patterns = converter.target_patterns, converter.source_patterns
    for expert, pattern in product(range(source.shape[0]), patterns):
        own = name.removesuffix(target) + pattern.replace("*", str(expert))
        yield own, Layer(source, _place(expert, patterns, pattern, source.shape))


def _stacks(converter: WeightConverter) -> bool:
    """Whether a converter only stacks experts, and perhaps joins the matrices of an expert one below the other."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _place(expert: int, patterns: Sequence[str], pattern: str, stack: Shape) -> TensorSlice:
    height, index = stack[1] // len(patterns), patterns.index(pattern)
    return TensorSlice((expert, index * height, 0), (expert + 1, (index + 1) * height, stack[2]))
