"""Bytes of a GPU under a plan, added up tensor by tensor as the trainer makes them, without the simulator's formulas.

In bfloat16 with FlashAttention. It leaves things out, so it is a lower bound: a plan that needs more cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.mapping import DeviceMapping, MappedPool, ModelPrediction


def layer_tensors(model: Architecture, tokens: float, tensor: int) -> Iterator[float]:
    """What one layer keeps for its backward pass."""
    hidden, ffn = tokens * model.hidden, tokens * model.ffn / tensor
    queries, keys = (tokens * heads * model.head_size / tensor for heads in (model.heads, model.kv_heads))
    for _ in ("input norm", "post-attention norm"):
        yield from (4 * hidden, 2 * hidden, 2 * hidden)
    for width in (queries, keys) if model.norms_heads else ():
        yield from (4 * width, 2 * width)
    yield from (2 * queries, 2 * keys, 2 * keys, 2 * queries, 4 * tokens * model.heads / tensor)
    yield from (2 * ffn, 2 * ffn, 2 * ffn, 2 * ffn)


def of_update(model: Architecture, sizes: ParallelSizes, predicted: ModelPrediction, tokens: float) -> float:
    """At the start of the backward pass of the last layer on the first stage, without gradients that wait."""
    layers = -(-model.layers // sizes.pipeline)
    one, given = sum(layer_tensors(model, tokens, sizes.tensor)), 2 * tokens * model.hidden
    kept = layers * (given if predicted.recomputes else one) * sizes.pipeline + one * predicted.recomputes
    weights = 2 * model.layer_parameters / sizes.tensor
    embedding = 2 * model.vocabulary * model.hidden / sizes.tensor
    return float(kept + 2 * weights + embedding)


def of_states(model: Architecture, sizes: ParallelSizes, *, trains: bool) -> float:
    """Float32 weights and two moments, or bfloat16 weights."""
    return model.parameters * (12 if trains else 2) * sizes.replicas / sizes.world_size


def fullest(mapping: DeviceMapping, pool: MappedPool, shapes: Mapping[Role, Architecture], longest: float) -> float:
    """Bytes at the fullest of the moments above; longest: tokens of a sequence that may come."""
    assert mapping.prediction
    models = {role: mapping.prediction.models[role] for role in pool.models}
    trained = {role for role in models if "update" in models[role].seconds}
    held = {role: of_states(shapes[role], mapping.sizes[role], trains=role in trained) for role in models}
    most = 0.0
    for role, predicted in models.items():
        beside = sum(size for other, size in held.items() if other != role and models[other].offload == "None")
        moment = beside + held[role]
        if role in trained:
            tokens = predicted.micro_batch * longest
            moment += of_update(shapes[role], mapping.sizes[role], predicted, tokens)
        most = max(most, moment)
    return most
