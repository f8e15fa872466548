"""Architecture of a model from a config.json or a manifest. A model trained from another job's model has its shape."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf_api.chain import SCHEME
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.model_shape import KNOWN, Shape
from rlhf_mapper.architecture import EXPERT_COUNTS, Architecture, architecture_of, experts_in

SCORERS: tuple[Role, ...] = ("critic", "reward", "cost", "cost_critic")
WORDS = tuple(name for name in Shape.model_fields if name != "name")
"""Fields that a Shape takes from config.json; num_experts has other names there, too."""
BEYOND = {
    name: beyond
    for name, known in KNOWN.items()
    if (beyond := {word: known[word] for word in known if word not in (*WORDS, "max_position_embeddings")})
}
"""Known model -> fields of its config.json that a Shape lacks, such as shared experts; the name implies them."""
SIZES = {*WORDS, *EXPERT_COUNTS} - {"model_type", "tie_word_embeddings"}
MAX_SIZE = 10_000_000
"""Upper bound of each size in a config.json; a larger value is an error."""
DECODERS = ("ForCausalLM", "ForSequenceClassification", "GPT2LMHeadModel")
"""Suffixes of the names of those transformers architectures that the trainer supports."""
GPT2_NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
OTHERS = ("bart", "bert", "distilbert", "electra", "mbart", "mt5", "pegasus", "roberta", "t5", "umt5", "xlm-roberta")
"""Model types that are not decoders; checked only for a config.json that names no architecture."""


class ModelConfigError(Exception):
    """Error for a config.json that does not give the shape of a decoder; the message is a clause about the file."""


def made_from(job: Job, role: Role, jobs: Mapping[str, Job]) -> tuple[Job, Role]:
    """Return (job, role) of the first model in the `job://` chain of a role's model; in a cycle, of any model."""
    visited: set[tuple[str, Role]] = set()
    # A URI of another scheme than job:// is no job's name.
    while (maker := jobs.get(job.models()[role].uri.removeprefix(SCHEME))) and (job.name, role) not in visited:
        visited.add((job.name, role))
        job, role = maker, maker.saved
    return job, role


def shape_of(text: str, role: Role) -> Architecture:
    """Return the architecture of a role's model from the text of its config.json. Raises ModelConfigError."""
    return _architecture(read(text), role)


def manifest_architecture(job: Job, role: Role, maker: Job, made: Role) -> Architecture | None:
    """Return a role's architecture by its `shape`, else that of role `made` in `maker`, else None. Raises SpecError."""
    for where, source in ((job, role), (maker, made)):
        if shape := where.models()[source].shape:
            try:
                return architecture_in(shape, role)
            except ModelConfigError as error:
                path = f"{where.name}: spec.models.{where.spec.models.source_field(source)}.shape"
                raise SpecError([Problem(path, str(error))]) from error
    return None


def architecture_in(shape: Shape, role: Role) -> Architecture:
    """Return the architecture of a role's model from the `shape` in a manifest or a status. Raises ModelConfigError."""
    given = {name: value for name in WORDS if (value := getattr(shape, name)) is not None}
    config = {**KNOWN.get(shape.name or "", {}), **given}
    _require_decoder(config)
    return _architecture(config, role)


def shape_in(text: str) -> Shape:
    """Return the fields of a config.json that make up a shape. Raises ModelConfigError."""
    config = read(text)
    _architecture(config, "actor")
    found: dict[str, Any] = {name: config[name] for name in WORDS if name in config}
    found["name"] = next((name for name, beyond in BEYOND.items() if beyond.items() <= config.items()), None)
    found["num_experts"] = experts_in(config)
    found["model_type"] = str(config.get("model_type", ""))[:64] or None
    found["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
    return Shape.model_validate(found, by_name=True)


def _architecture(config: Mapping[str, Any], role: Role) -> Architecture:
    try:
        return architecture_of(config, scores=role in SCORERS)
    except KeyError as error:
        raise ModelConfigError(f"has no {error.args[0]}, which the shape of a model needs") from error


def read(text: str) -> dict[str, Any]:
    """Parse a config.json without its nulls. Raises ModelConfigError if it describes no decoder."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ModelConfigError(f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError("is no mapping")
    config = {GPT2_NAMES.get(name, name): value for name, value in config.items() if value is not None}
    if config.get("model_type") == "gpt2" and isinstance(hidden := config.get("hidden_size"), int):
        width = config.get("n_inner", 4 * hidden)
        config = {"intermediate_size": width, "tie_word_embeddings": True, **config}
    _require_decoder(config)
    return config


def _require_decoder(config: Mapping[str, Any]) -> None:
    """Raise ModelConfigError if a configuration describes no decoder, or has sizes that no decoder can have."""
    names = config.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"architectures is {json.dumps(names)[:100]}, expected a list of names")
    is_decoder = any(name.endswith(DECODERS) for name in names) if names else config.get("model_type") not in OTHERS
    if not is_decoder or config.get("is_encoder_decoder") or "type_vocab_size" in config:  # T5, BERT and their kin
        kind = ", ".join(names) or str(config.get("model_type", "this model"))
        raise ModelConfigError(f"{kind} is no decoder (such as LlamaForCausalLM), and only those are trained here")
    _require_sizes(config)


def _require_sizes(config: Mapping[str, Any]) -> None:
    """Raise ModelConfigError for a size that no decoder can have, or for two that contradict each other."""
    for name in SIZES:
        value = config.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{name} is {json.dumps(value)[:100]}, expected a positive whole number")
        if value > MAX_SIZE:
            raise ModelConfigError(f"{name} is beyond {MAX_SIZE:,}, which no model has")
    heads, hidden = config.get("num_attention_heads", 1), config.get("hidden_size")
    kv_heads, per_token = config.get("num_key_value_heads", heads), config.get("num_experts_per_tok", 1)
    experts = experts_in(config)
    if hidden and hidden % heads and "head_dim" not in config:
        raise ModelConfigError(f"num_attention_heads is {heads}, which does not divide hidden_size, {hidden}")
    if heads % kv_heads:
        raise ModelConfigError(f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}")
    if experts and per_token > experts:
        raise ModelConfigError(f"num_experts_per_tok is {per_token}, but there are {experts} experts")
