"""Transformers models as the trainer uses them: a causal language model, and a scorer with one value for each token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class MissingLayer(nn.Module):
    """Replaces a layer, norm or head that another pipeline stage holds, so that the other modules keep their names."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden


class Scorer(nn.Module):
    """A sequence classification model with one label, read at every token: reward model and critic.

    `forward(tokens [B, T]) -> [B, T]` float32: the score head after each token. Later pipeline stages take
    hidden states [B, T, H] instead of tokens, and stages without the head return them.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, given: Tensor) -> Tensor:
        hidden: Tensor = self.classifier.base_model(**_named(given), use_cache=False).last_hidden_state
        scores: Tensor = self.classifier.score(hidden)
        return scores if isinstance(self.classifier.score, MissingLayer) else scores.squeeze(-1).float()


class LanguageModel(nn.Module):
    """A causal language model: `forward(tokens [B, T]) -> logits [B, T, V]`. Right padding needs no attention mask.

    Later pipeline stages take hidden states [B, T, H] instead of tokens, and stages without the head return them.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, given: Tensor) -> Tensor:
        logits: Tensor = self.causal_lm(**_named(given), use_cache=False).logits
        return logits


def _named(given: Tensor) -> dict[str, Tensor]:
    """The input under the name that transformers has for token ids or for the hidden states of another stage."""
    return {"inputs_embeds" if given.is_floating_point() else "input_ids": given}


def inner(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a Scorer or LanguageModel."""
    found = model.classifier if isinstance(model, Scorer) else model.causal_lm
    assert isinstance(found, PreTrainedModel)
    return found


def has_copy_of_embedding(model: nn.Module) -> bool:
    """Whether this is a pipeline's last stage, whose head is a copy of the first stage's embedding."""
    head = getattr(inner(model), "lm_head", None)
    has_head = head is not None and not isinstance(head, MissingLayer)
    return has_head and ties_embedding(model) and _embedding(model) is None


def ties_embedding(model: nn.Module) -> bool:
    """Whether a model is a language model whose head is its embedding."""
    return isinstance(model, LanguageModel) and bool(inner(model).config.tie_word_embeddings)


def tied_embedding(model: nn.Module) -> nn.Parameter:
    """The embedding of a first stage, or its copy on a last stage."""
    pretrained: Any = inner(model)
    parameter = pretrained.lm_head.weight if has_copy_of_embedding(model) else _embedding(model).weight
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _embedding(model: nn.Module) -> Any:
    """The embedding; None on a stage without it."""
    base: Any = inner(model).base_model
    return base.embed_tokens
