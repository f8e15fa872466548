"""Transformers models as the trainer uses them: a causal language model, and a scorer with one value for each token."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_trainer.errors import DataError
from rlhf_trainer.stored_tensors import FLOAT32, TensorSource
from rlhf_trainer.training.head import Likelihood, divergence_from, likeliest_tokens, likelihood
from rlhf_trainer.training.model_input import ModelInput

# FSDP2 warns that outputs are views ([rows * T] seen as [rows, T]), which must not be changed in place; losses do not.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

Weights = Mapping[str, TensorSource]
"""Sources of the values of a model's parameters, by Hugging Face name."""


@dataclass(frozen=True)
class Adapter:
    """Settings of the low-rank adapter of a model (`lora`)."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Last parts of the adapted modules' names, such as `q_proj`."""
    base: str
    """Folder, or name on the hub, of the frozen base model."""
    revision: str | None
    trust_remote_code: bool
    scores: bool
    """Whether the adapted model is a scorer, whose head is trained too."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class MissingLayer(nn.Module):
    """Stand-in for a layer, norm or head of another pipeline stage, so that the remaining modules keep their names."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden


class Scorer(nn.Module):
    """A sequence classification model that scores each token by one of its labels: reward model or critic.

    The output is float32 [rows, T]: the label's value after each token, 0 at padding. Later pipeline stages take hidden
    states [1, N / t, H] instead of tokens, and stages without the head return them.
    """

    def __init__(self, classifier: PreTrainedModel, weights: Weights | None = None, *, label: int = 0) -> None:
        """weights: sources of the parameters' values; label: index of the score among the outputs of the head."""
        super().__init__()
        self.classifier, self.weights, self._label = classifier, weights, label
        self.adapter: Adapter | None = None

    def forward(self, given: Tensor, text: ModelInput) -> Tensor:
        hidden = _last_hidden_state(self.classifier, given, text)
        if isinstance(self.classifier.score, MissingLayer):
            return hidden
        scores: Tensor = self.classifier.score(hidden)
        return text.unpacked(scores[0, :, self._label].float().index_select(0, text.packed), text.whole)


class LanguageModel(nn.Module):
    """A causal language model; its output is the `Likelihood` [rows, T] of the tokens that a loss reads, 0 elsewhere.

    An input with `likeliest` gets `likeliest_tokens` [rows, T, 2K] instead.

    Pipeline stages: see `Scorer`. Likelihoods are computed in the forward pass, while FSDP2 gathers the head's weight.
    """

    def __init__(self, causal_lm: PreTrainedModel, weights: Weights | None = None) -> None:
        """weights: sources of parameters on the meta device, read by `shard`. DataError for a head with a bias."""
        super().__init__()
        head: Any = causal_lm.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise DataError(f"{causal_lm.name_or_path}: the model's head has a bias, which is not supported")
        self.causal_lm, self.weights = causal_lm, weights
        self.adapter: Adapter | None = None
        self.kernels: ModuleType | None = None
        """Kernels of the head; see `HeadOptions`."""
        # Granite divides the logits, Cohere multiplies them, Gemma 2 bounds them.
        scale = getattr(causal_lm.config, "logit_scale", None) or 1.0
        self._divisor: float = (getattr(causal_lm.config, "logits_scaling", None) or 1.0) / scale
        self._cap: float | None = getattr(causal_lm.config, "final_logit_softcapping", None)

    def forward(self, given: Tensor, text: ModelInput) -> Tensor | Likelihood:
        hidden = _last_hidden_state(self.causal_lm, given, text)
        head: Any = self.causal_lm.get_output_embeddings()
        if isinstance(head, MissingLayer):
            return hidden
        before = hidden[0].index_select(0, text.before)
        before = before if self._divisor == 1.0 else before / self._divisor
        inputs, cap = (before, head.weight, text.temperature), self._cap
        if text.likeliest:
            count, of = text.likeliest
            return text.unpacked(likeliest_tokens(*inputs, count=count, of=of, softcap=cap), text.places)
        options: dict[str, Any] = {"entropy": text.entropy, "softcap": cap, "kernels": self.kernels}
        log_probs, entropy, _ = likelihood(before, head.weight, text.targets, text.temperature, **options)
        found = [log_probs, entropy]
        if text.teacher is not None and text.compare:
            found.append(divergence_from(text.teacher, *inputs, compare=text.compare, softcap=cap))
        return Likelihood(*(text.unpacked(values, text.places) for values in found))


def _last_hidden_state(model: PreTrainedModel, given: Tensor, text: ModelInput) -> Tensor:
    """Return the hidden states after the final norm, from token ids or another stage's hidden states: [1, N, H]."""
    name = "inputs_embeds" if given.is_floating_point() else "input_ids"
    inputs = {name: given, "position_ids": text.positions, "documents": text.documents}
    if text.experts is not None:
        inputs["experts"] = text.experts
    hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def inner(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a Scorer or LanguageModel."""
    found = model.classifier if isinstance(model, Scorer) else model.causal_lm
    assert isinstance(found, PreTrainedModel)
    return found


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are read from a model's files and exported as they are (`FLOAT32`), by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(FLOAT32)}


def has_copy_of_embedding(model: nn.Module) -> bool:
    """Whether the rank has a tied model's last pipeline stage, whose head is a copy of the first stage's embedding."""
    has_head = not isinstance(getattr(inner(model), "lm_head", None), MissingLayer | None)
    return has_head and ties_embedding(model) and _embedding(model) is None


def ties_embedding(model: nn.Module) -> bool:
    """Whether a model is a language model whose head has the embedding's weight (tied weights)."""
    return isinstance(model, LanguageModel) and bool(inner(model).config.tie_word_embeddings)


def trained_tie(model: nn.Module) -> nn.Parameter | None:
    """Return the trained tied embedding of a first pipeline stage, or its copy in a last stage's head; else None."""
    if not ties_embedding(model):
        return None
    pretrained: Any = inner(model)
    parameter: nn.Parameter = pretrained.lm_head.weight if has_copy_of_embedding(model) else _embedding(model).weight
    return parameter if parameter.requires_grad else None


def _embedding(model: nn.Module) -> Any:
    """Return the token embedding of a model; None on a pipeline stage without an embedding."""
    base: Any = inner(model).base_model
    return base.embed_tokens if hasattr(base, "embed_tokens") else base.get_input_embeddings()
