"""Causal attention inside the documents of a packed row, as functions that transformers' models call."""

from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_api.spec.job_spec import Attention
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training.model_input import Documents

NAMES = {"SDPA": "documents_by_sdpa", "Flash": "documents_by_varlen"}
"""Value of `training.attention` -> name under which transformers knows our function; it reserves names with "flash"."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""The `layer_types` of config.json that keep packed texts apart; convolutions and recurrent layers do not."""
FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Argument of `varlen_attn` that allows fewer key than query heads; torch 2.11 allows them without an argument."""


def use_attention(model: PreTrainedModel, attention: Attention, *, device: torch.device, dtype: torch.dtype) -> None:
    """Make a model attend within documents, by the kernels of `training.attention`.

    Auto is Flash where the GPU and the compute type allow it, else SDPA. Raises ConfigError if the model's code does
    not let its attention be chosen, and for Flash where it cannot run.
    """
    if not (model._supports_attention_backend and model._supports_sdpa):  # noqa: SLF001 there are no public names
        raise ConfigError(
            f"{model.name_or_path}: the attention of {type(model).__name__} cannot be chosen, so texts cannot be "
            "packed; code of its own must attend by transformers' AttentionInterface (_supports_attention_backend)"
        )
    config: Any = model.config
    if other := set(getattr(config, "layer_types", None) or ()) - PACKED_LAYERS:
        raise ConfigError(
            f"{model.name_or_path}: {type(model).__name__} has layers ({', '.join(sorted(other))}) that would mix "
            "texts which are packed in one row"
        )
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    runs_flash = device.type == "cuda" and dtype is not torch.float32 and not capped
    runs_flash = runs_flash and torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    runs_flash = runs_flash and not getattr(config, "kv_lora_rank", None)  # its values are narrower than its keys
    if attention == "Flash" and not runs_flash:
        raise ConfigError(
            "spec.training.attention: Flash needs BF16 on GPUs from Ampere on, and a model that does not bound the "
            "scores of attention (attn_logit_softcapping); Auto takes what runs"
        )
    chosen = ("Flash" if runs_flash else "SDPA") if attention == "Auto" else attention
    model.config._attn_implementation = NAMES[chosen]  # noqa: SLF001 as above


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

    Neighbouring documents of equal lengths are one call. sliding_window: maximum number of tokens that a token sees,
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


for _attention, _function in (("SDPA", _by_sdpa), ("Flash", _by_flash)):
    _outside = torch.compiler.disable(_function)  # type: ignore[no-untyped-call]  # it would be compiled for each length
    AttentionInterface.register(NAMES[_attention], _outside)
