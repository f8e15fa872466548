"""Texts packed to one row give what each gives alone, padded and by transformers' own attention."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_trainer.errors import ConfigError
from rlhf_trainer.training import attention
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.model_input import ModelInput, Text
from rlhf_trainer.training.models import LanguageModel, Scorer, inner
from tests.trainer.tiny import FAMILIES, divisible_config

LENGTHS, OTHER_LENGTHS = torch.tensor([7, 1, 0, 12]), torch.tensor([3, 15, 2, 9])


def texts() -> list[Text]:
    """Rows of two kinds: some tokens are read of the first, at another temperature, and all of the second."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randint(3, 500, (4, 12), generator=generator),
        torch.randint(3, 500, (4, 16), generator=generator),
    )
    read = torch.randint(2, first.shape, generator=generator).float()
    return [
        Text(tokens=first, lengths=LENGTHS, read=read, temperature=0.5, entropy=True),
        Text(tokens=second, lengths=OTHER_LENGTHS, read=torch.ones(second.shape)),
    ]


def pair(config: PreTrainedConfig, factory: Any = AutoModelForCausalLM) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with equal weights: one that the trainer runs, and transformers' own."""
    torch.manual_seed(0)
    model = factory.from_config(deepcopy(config))
    other = factory.from_config(deepcopy(config))
    other.load_state_dict(model.state_dict())
    return model, other


def ready(model: Any) -> Any:
    use_attention(inner(model), "Auto", device=torch.device("cpu"), dtype=torch.float32)
    return model


CONFIGS = {family: divisible_config(family) for family in FAMILIES} | {
    "a window of 4 tokens": MistralConfig(
        **{**divisible_config().to_dict(), "model_type": "mistral", "architectures": None, "sliding_window": 4}
    ),
    "another kind of model": GPTNeoXConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    ),
}


def varlen_attention_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of `varlen_attn`, which runs on GPUs only: [N, heads, size] of packed documents."""
    assert int(starts.diff().max()) == longest
    outputs = []
    for start, stop in pairwise(starts.tolist()):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        place = torch.arange(stop - start)
        back = place[:, None] - place[None, :]
        left, right = (window_size[0] if window_size[0] >= 0 else stop), window_size[1]
        seen = (back <= left) & (back >= -right)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("name", "by"), [*((name, "SDPA") for name in CONFIGS), ("llama", "Flash"), ("a window of 4 tokens", "Flash")]
)
def test_log_probs_entropies_and_gradients_are_those_of_each_text_alone(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = pair(CONFIGS[name])
    given = ModelInput.of(texts(), at_least=60)  # with a document of padding
    model = ready(LanguageModel(own))
    own.config._attn_implementation = attention.NAMES[by]
    monkeypatch.setattr(attention, "varlen_attn", varlen_attention_by_definition)
    found = model(given.tokens, given)
    assert found.log_probs.shape == (8, 16)
    expected, entropy = torch.zeros(8, 16), torch.zeros(8, 16)
    for first, text in zip((0, 4), texts(), strict=True):
        for row, length in enumerate(text.lengths.tolist()):
            if not length:
                continue
            tokens = text.tokens[row : row + 1, :length]
            spread = (other(tokens).logits[0, :-1] / text.temperature).log_softmax(1)
            assert text.read is not None
            read = text.read[row, 1:length] > 0
            expected[first + row, 1:length] = spread.gather(1, tokens[0, 1:, None])[:, 0] * read
            entropy[first + row, 1:length] = -(spread.exp() * spread).sum(1) * read
    assert_close(found.log_probs, expected, atol=1e-5, rtol=1e-5)
    assert_close(found.entropy, entropy, atol=1e-5, rtol=1e-5)
    weights = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    (found.log_probs * weights).sum().backward()
    torch.autograd.backward((expected * weights).sum())
    for (parameter, mine), theirs in zip(own.named_parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=parameter)


def test_scores_are_those_of_each_text_alone() -> None:
    config = divisible_config()
    config.num_labels = 1
    own, other = pair(config, AutoModelForSequenceClassification)
    given = ModelInput.of(texts(), at_least=60)
    scores: Tensor = ready(Scorer(own))(given.tokens, given)
    assert scores.shape == (8, 16)
    for row, (text, length) in enumerate((each, length) for each in texts() for length in each.lengths.tolist()):
        assert not scores[row, length:].any()
        if length:
            hidden = other.base_model(text.tokens[row % 4 : row % 4 + 1, :length]).last_hidden_state
            assert_close(scores[row, :length], other.score(hidden)[0, :, 0], atol=1e-5, rtol=1e-5)


def test_packed_texts_have_no_padding() -> None:
    given = ModelInput.of(texts())
    assert given.tokens.shape == (1, 7 + 1 + 12 + 3 + 15 + 2 + 9)
    assert given.documents.lengths == (7, 1, 12, 3, 15, 2, 9)
    assert given.documents.starts.tolist() == [0, 7, 8, 20, 23, 38, 40, 49]


def test_a_micro_batch_without_text_is_one_token_that_nothing_reads() -> None:
    nothing = Text(tokens=torch.zeros(1, 1, dtype=torch.int64), lengths=torch.zeros(1, dtype=torch.int64))
    given = ModelInput.of([nothing])
    assert given.tokens.tolist() == [[0]]
    own, _ = pair(CONFIGS["llama"])
    model = ready(LanguageModel(own))
    log_probs = model(given.tokens, given).log_probs
    assert log_probs.tolist() == [[0.0]]
    log_probs.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in own.parameters())


def test_a_model_whose_attention_cannot_be_chosen_is_refused() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=32, hidden_size=8, n_layer=1, n_head=1)
    with pytest.raises(ConfigError, match="the attention of BloomForCausalLM cannot be chosen"):
        ready(LanguageModel(AutoModelForCausalLM.from_config(config)))


def test_a_model_whose_layers_mix_neighbouring_tokens_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "lfm2", vocab_size=32, layer_types=["conv", "full_attention"], num_hidden_layers=2, **sizes
    )
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM has layers \(conv\) that would mix texts"):
        ready(LanguageModel(AutoModelForCausalLM.from_config(config)))


def test_flash_is_refused_where_it_cannot_run() -> None:
    model = AutoModelForCausalLM.from_config(divisible_config())
    with pytest.raises(ConfigError, match=r"spec\.training\.attention: Flash needs BF16 on GPUs from Ampere on"):
        use_attention(model, "Flash", device=torch.device("cpu"), dtype=torch.bfloat16)
