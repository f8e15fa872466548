"""Causal attention inside the documents of a packed row, as functions that transformers' models call."""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_api.spec.job_spec import Attention
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.context import heads_for_tokens, of_all_tokens, tokens_for_heads
from rlhf_trainer.training.model_input import Documents

NAMES = {"SDPA": "documents_by_sdpa", "Flash": "documents_by_varlen"}
"""Value of `training.attention` -> name under which transformers knows our function; it reserves names with "flash"."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""The `layer_types` of config.json that keep packed texts apart; convolutions and recurrent layers do not."""
FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Argument of `varlen_attn` that allows fewer key than query heads; torch 2.11 allows them without an argument."""
Attend = Callable[..., tuple[Tensor, None]]
"""Attention as transformers calls it: (module, q, k, v [1, heads, N, size], mask, options) -> [1, N, heads, size]."""


def use_attention(model: PreTrainedModel, attention: Attention, *, device: torch.device, dtype: torch.dtype) -> None:
    """Make a model attend within documents, by the kernels of `training.attention`.

    Auto is Flash where the GPU and the compute type allow it, else SDPA. Raises ConfigError if the model's code does
    not let its attention be chosen, and for Flash where it cannot run.
    """
    config: Any = model.config
    if reason := why_not_packed(type(model), config):
        raise ConfigError(f"{model.name_or_path}: {reason}")
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    runs_flash = device.type == "cuda" and dtype is not torch.float32 and not capped
    runs_flash = runs_flash and torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    runs_flash = runs_flash and not getattr(config, "kv_lora_rank", None)  # its values are narrower than its keys
    if attention == "Flash" and not runs_flash:
        raise ConfigError(
            "spec.training.attention: Flash needs BF16 on GPUs from Ampere on, and a model that does not bound the "
            "scores of attention (attn_logit_softcapping) and has values as wide as its keys; Auto takes what runs"
        )
    chosen = ("Flash" if runs_flash else "SDPA") if attention == "Auto" else attention
    model.config._attn_implementation = NAMES[chosen]  # noqa: SLF001 as above


def why_not_packed(model: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Say why texts cannot be packed in one row, and rows cannot be cut over ranks, for a model; empty if they can."""
    if not (model._supports_attention_backend and model._supports_sdpa):  # noqa: SLF001 there are no public names
        return (
            f"the attention of {model.__name__} cannot be chosen, so texts cannot be packed; code of its own must "
            "attend by transformers' AttentionInterface (_supports_attention_backend)"
        )
    if other := set(getattr(config, "layer_types", None) or ()) - PACKED_LAYERS:
        layers = ", ".join(sorted(other))
        return f"{model.__name__} has layers ({layers}) that would mix texts which are packed in one row"
    return ""


def _by_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _: Tensor | None,
    *,
    documents: Documents,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by torch's SDPA: [1, heads, N, size], key and value with perhaps fewer heads -> [1, N, heads, size].

    Neighbouring documents of equal lengths share one call. sliding_window: maximum number of tokens that a token sees,
    itself included. softcap: bound of the scores, as in Gemma 2; no kernel of torch's SDPA has it.
    """
    key, value = (_seen(each, documents) for each in (key, value))
    alike = [(len(list(run)), *sizes) for sizes, run in groupby(zip(documents.lengths, documents.seen, strict=True))]
    queries = torch.split(query, [count * own for count, own, _ in alike], dim=2)
    keys, values = (torch.split(each, [count * seen for count, _, seen in alike], dim=2) for each in (key, value))
    outputs = []
    for (count, own, seen), *part in zip(alike, queries, keys, values, strict=True):
        stacked = [each[0].view(-1, count, each.shape[2] // count, each.shape[3]).transpose(0, 1) for each in part]
        mask = _mask(own, seen, min(sliding_window or seen, seen), query.device, is_needed=bool(softcap))
        if softcap:
            own_query, own_key, own_value = stacked
            attended = _softcapped(own_query, own_key, own_value, mask, softcap=softcap, scaling=options["scaling"])
        else:
            if mask is None and seen > own:
                stacked[0] = pad(stacked[0], (0, 0, seen - own, 0))
            attended = sdpa_attention_forward(module, *stacked, mask, **options)[0]
        outputs.append(attended[:, -own:].flatten(0, 1))
    return torch.cat(outputs)[None], None


def _mask(own: int, seen: int, window: int, device: torch.device, *, is_needed: bool) -> Tensor | None:
    """Return a document's causal mask, bool [own tokens, seen tokens]; None if SDPA's faster built-in mask is right."""
    prompt = seen - own
    if window == seen and prompt <= own and not is_needed:
        return None
    return torch.ones(own, seen, dtype=torch.bool, device=device).tril(prompt).triu(prompt + 1 - window)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, softcap: float, scaling: float
) -> Tensor:
    """Attend with bounded scores: q [B, heads, own, size], k [B, kv heads, seen, size] -> [B, own, heads, size]."""
    assert mask is not None, "a causal square has one too"
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap))
    weights = scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2)


def _seen(given: Tensor, documents: Documents) -> Tensor:
    """Gather the keys or values that each document sees: [1, heads, N, size] -> [1, heads, sum of seen, size]."""
    if documents.seen_tokens is None:
        return given
    _, heads, _, size = given.shape
    table = given[0].transpose(0, 1).reshape(-1, heads * size)  # on CPU index_select has a slower backward pass
    return embedding(documents.seen_tokens, table).view(1, -1, heads, size).transpose(1, 2)


def _by_flash(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: Tensor | None,
    *,
    documents: Documents,
    scaling: float,
    sliding_window: int | None = None,
    **___: Any,
) -> tuple[Tensor, None]:
    """Attend like `_by_sdpa` in one FlashAttention call; a document's own tokens are its queries and its last keys."""
    key, value = (_seen(each, documents) for each in (key, value))
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    starts, longest = (documents.starts, documents.seen_starts), (max(documents.lengths), max(documents.seen))
    window = (sliding_window - 1 if sliding_window else -1, 0)
    output = varlen_attn(query, key, value, *starts, *longest, scale=scaling, window_size=window, **FEWER_KEYS)
    assert isinstance(output, Tensor)
    return output[None], None


def over_context(attend: Attend) -> Attend:
    """Wrap `attend` for rows that context-parallel ranks share; if a rank holds whole rows, `attend` runs unchanged.

    Where heads divide evenly, each rank attends for some heads over all tokens (DeepSpeed-Ulysses, arXiv:2309.14509).
    Else each attends for its own tokens over all keys and values, so the last rank of a long text does more.
    """

    def attended(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        documents: Documents = options["documents"]
        group, own = documents.group, documents.own
        if group is None or own is None:
            return attend(module, query, key, value, mask, **options)
        ranks = group.size()
        if query.shape[1] % ranks or (key.shape[1] % ranks and ranks % key.shape[1]):
            key, value = (of_all_tokens(each, group) for each in (key, value))
            return attend(module, query, key, value, mask, **options | {"documents": own})
        if key.shape[1] < ranks:
            key, value = (each.repeat_interleave(ranks // key.shape[1], dim=1) for each in (key, value))
            module = SimpleNamespace(num_key_value_groups=query.shape[1] // ranks, is_causal=True)
        query, key, value = (heads_for_tokens(each, group) for each in (query, key, value))
        whole = replace(documents, own=None, group=None)
        output, _ = attend(module, query, key, value, mask, **options | {"documents": whole})
        return tokens_for_heads(output, group), None

    return attended


for _attention, _function in (("SDPA", _by_sdpa), ("Flash", _by_flash)):
    _outside = torch.compiler.disable(over_context(_function))  # type: ignore[no-untyped-call]  # it would be compiled for each length
    AttentionInterface.register(NAMES[_attention], _outside)
