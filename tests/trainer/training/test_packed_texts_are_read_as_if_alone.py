"""Texts packed to one row give what each gives alone, padded and by transformers' own attention."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
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

from rlhf_api.problems import SpecError
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.run.preconditions import require_possible
from rlhf_trainer.training import attention
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel, Scorer, inner
from tests.trainer.families import FAMILIES as EVERY_FAMILY
from tests.trainer.jobs import job
from tests.trainer.tiny import FAMILIES, divisible_config

LENGTHS, OTHER_LENGTHS = torch.tensor([7, 1, 0, 12]), torch.tensor([3, 15, 2, 9])


def texts() -> list[TokenBatch]:
    """Rows of two kinds: some tokens are read of the first, at another temperature, and all of the second."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randint(3, 500, (4, 12), generator=generator),
        torch.randint(3, 500, (4, 16), generator=generator),
    )
    read = torch.randint(2, first.shape, generator=generator).float()
    return [
        TokenBatch(tokens=first, lengths=LENGTHS, read=read, temperature=0.5, entropy=True),
        TokenBatch(tokens=second, lengths=OTHER_LENGTHS, read=torch.ones(second.shape)),
    ]


def groups() -> list[TokenBatch]:
    """Return `texts` in which rows begin alike.

    Rows 0 and 3 of both and row 1 of the second share five tokens, and all rows of the second share two. The last row
    has one token more than it shares, and row 2 of the second has none.
    """
    first, second = texts()
    for tokens in (first.tokens[3], second.tokens[1], second.tokens[3]):
        tokens[:5] = first.tokens[0, :5]
    second.tokens[:, :2] = first.tokens[0, :2]
    lengths = OTHER_LENGTHS.clone()
    lengths[3] = 6
    return [first, replace(second, lengths=lengths)]


def tree(seed: int) -> list[TokenBatch]:
    """Two texts of 7 rows, each of which is new, an earlier text, its beginning, or either of them and more tokens."""
    chosen = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=chosen))

    every: list[list[int]] = []
    for _ in range(14):
        base = every[drawn(0, len(every))] if every and drawn(0, 5) else []
        base = base[: drawn(0, len(base) + 1)] if drawn(0, 2) else base
        further = torch.randint(3, 500, (drawn(0, 8),), generator=chosen).tolist() if drawn(0, 6) else []
        every.append([*base, *further][:24])
    return [
        TokenBatch(
            tokens=torch.tensor([row + [0] * (24 - len(row)) for row in rows]),
            lengths=torch.tensor(list(map(len, rows))),
            read=torch.randint(2, (7, 24), generator=chosen).float(),
            temperature=temperature,
            entropy=True,
        )
        for rows, temperature in ((every[::2], 0.5), (every[1::2], 1.0))
    ]


BATCHES: dict[str, Callable[[], list[TokenBatch]]] = {"alone": texts, "groups": groups, "tree": partial(tree, 4)}


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
    key_starts: Tensor,
    longest: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch and FlashAttention 2 document of `varlen_attn`, which runs on GPUs only: [N, heads, size] of packed
    documents; the last query of each sees up to its last key."""
    assert [int(each.diff().max()) for each in (starts, key_starts)] == [longest, most_keys]
    outputs = []
    for (start, stop), (first, last) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        q, k, v = (
            each[slice(*place)].transpose(0, 1)
            for each, place in ((query, (start, stop)), (key, (first, last)), (value, (first, last)))
        )
        place = torch.arange(last - first)
        back = place[start - stop :, None] - place[None, :]
        left, right = (window_size[0] if window_size[0] >= 0 else last), window_size[1]
        seen = (back <= left) & (back >= -right)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "by"), [*((name, "SDPA") for name in CONFIGS), ("llama", "Flash"), ("a window of 4 tokens", "Flash")]
)
def test_log_probs_and_gradients_are_those_of_each_text(
    name: str, by: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = pair(CONFIGS[name])
    given = ModelInput.of(BATCHES[batch](), at_least=60)  # with a document of padding
    model = ready(LanguageModel(own))
    own.config._attn_implementation = attention.NAMES[by]
    monkeypatch.setattr(attention, "varlen_attn", varlen_attention_by_definition)
    found = model(given.tokens, given)
    both = BATCHES[batch]()
    count, width = len(both[0].tokens), both[1].tokens.shape[1]
    expected, entropy = torch.zeros(2 * count, width), torch.zeros(2 * count, width)
    assert found.log_probs.shape == expected.shape
    for first, text in zip((0, count), both, strict=True):
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
    require_same_gradients(own, other, found.log_probs, expected)


def require_same_gradients(own: PreTrainedModel, other: PreTrainedModel, found: Tensor, expected: Tensor) -> None:
    """Of both models, by losses that weigh each of their outputs alike."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((found * weights).sum())
    torch.autograd.backward((expected * weights).sum())
    for (parameter, mine), theirs in zip(own.named_parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("batch", BATCHES)
def test_scores_and_gradients_are_those_of_each_text_alone(batch: str) -> None:
    config = divisible_config()
    config.num_labels = 1
    own, other = pair(config, AutoModelForSequenceClassification)
    given = ModelInput.of(BATCHES[batch](), at_least=60)
    scores: Tensor = ready(Scorer(own))(given.tokens, given)
    both = BATCHES[batch]()
    count = len(both[0].tokens)
    expected = torch.zeros(2 * count, both[1].tokens.shape[1])
    assert scores.shape == expected.shape
    for row, (text, length) in enumerate((each, length) for each in both for length in each.lengths.tolist()):
        if length:
            hidden = other.base_model(text.tokens[row % count : row % count + 1, :length]).last_hidden_state
            expected[row, :length] = other.score(hidden)[0, :, 0]
    assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    require_same_gradients(own, other, scores, expected)


def require_tree_as_whole_rows(model: LanguageModel | Scorer, seed: int) -> None:
    """Outputs and gradients of a random tree are those of its rows, each of which is computed whole."""
    found = []
    for share in (True, False):
        given = ModelInput.of(tree(seed), share=share, at_least=1 + seed)
        output = model(given.tokens, given)
        outputs = [output.log_probs, output.entropy] if isinstance(model, LanguageModel) else [output]
        weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        torch.autograd.backward(torch.stack([(each * weights).sum() for each in outputs]).sum())
        found.append((outputs, [each.grad for each in model.parameters()], given.tokens.numel() - given.padding))
    (outputs, gradients, tokens), (expected, whole_gradients, whole) = found
    assert tokens < whole
    assert_close(outputs, expected, atol=2e-5, rtol=2e-5)
    assert_close(gradients, whole_gradients, atol=2e-4, rtol=2e-4)


SCORER = "a scorer"


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        pytest.param(name, seeds, marks=() if len(seeds) == 3 else pytest.mark.slow, id=f"{name}, {len(seeds)}")
        for name in (*CONFIGS, SCORER)
        for seeds in (range(3), range(3, 150))
    ],
)
def test_random_trees_are_computed_as_whole_rows_are(name: str, seeds: range) -> None:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS["llama" if name == SCORER else name])
    config.num_labels = 1
    if name == SCORER:
        model = ready(Scorer(AutoModelForSequenceClassification.from_config(config)))
    else:
        model = ready(LanguageModel(AutoModelForCausalLM.from_config(config)))
    for seed in seeds:
        require_tree_as_whole_rows(model, seed)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("by", attention.NAMES)
def test_parts_of_a_row_see_what_the_whole_row_sees(
    by: str, batch: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen_attention_by_definition)
    attend: Any = attention._by_sdpa if by == "SDPA" else attention._by_flash
    given = ModelInput.of(BATCHES[batch](), at_least=50, multiple=20)
    whole, tokens = given.documents, given.tokens.numel()
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, tokens, 8, generator=generator)
    options = {"sliding_window": window, "scaling": 0.3}
    expected, _ = attend(torch.nn.Module(), query, key, value, None, documents=whole, **options)
    for first in range(0, tokens, 20):
        part, own = whole.between(first, first + 20), query[:, :, first : first + 20]
        assert sum(part.lengths) == 20
        found, _ = attend(torch.nn.Module(), own, key, value, None, documents=part, **options)
        assert_close(found, expected[:, first : first + 20], atol=1e-6, rtol=1e-5)


def test_packed_texts_have_no_padding() -> None:
    given = ModelInput.of(texts())
    assert given.tokens.shape == (1, 7 + 1 + 12 + 3 + 15 + 2 + 9)
    assert given.documents.lengths == given.documents.seen == (7, 1, 12, 3, 15, 2, 9)
    assert given.documents.starts.tolist() == given.documents.seen_starts.tolist() == [0, 7, 8, 20, 23, 38, 40, 49]
    assert given.documents.seen_tokens is None
    assert given.padding == 0


def test_a_prefix_that_rows_share_is_computed_once() -> None:
    """Turns of 3, 7 and 12 tokens; the third is the first row, and the last row differs from it after 9 tokens."""
    tokens = torch.arange(100, 112).repeat(4, 1)
    tokens[3, 9:] = 5
    text = TokenBatch(tokens=tokens, lengths=torch.tensor([12, 3, 7, 11]))
    given = ModelInput.of([text], at_least=20)
    assert given.documents.lengths == (3, 12 - 9, 7 - 3, 11 - 7, 6)
    assert given.documents.seen == (3, 12, 7, 11, 6)
    assert given.tokens[0].tolist() == [*range(100, 103), *range(109, 112), *range(103, 109), 5, 5, *[0] * 6]
    assert given.positions[0].tolist() == [*range(3), *range(9, 12), *range(3, 11), *range(6)]
    assert given.packed[:12].tolist() == [*range(3), *range(6, 12), *range(3, 6)]


def test_a_batch_of_groups_is_three_quarters_of_its_tokens() -> None:
    """16 prompts of 32 tokens with 4 responses of 64 each."""
    tokens = torch.randint(500, (16, 96)).repeat_interleave(4, dim=0)
    tokens[:, 32:] = torch.randint(500, (64, 64))
    tokens[:, 32] = torch.arange(64)
    whole = TokenBatch(tokens=tokens, lengths=torch.full((64,), 96))
    assert ModelInput.of([whole], share=False).tokens.numel() == 6144
    assert ModelInput.of([whole]).tokens.numel() == 4608


def test_a_micro_batch_without_text_is_one_unread_token() -> None:
    nothing = TokenBatch(tokens=torch.zeros(1, 1, dtype=torch.int64), lengths=torch.zeros(1, dtype=torch.int64))
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


def test_rows_of_an_unknown_attention_are_not_cut_over_ranks(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom", vocab_size=32, hidden_size=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    actor = {"uri": f"file://{tmp_path}", "optimizer": {}, "parallelism": {"context": 2}}
    data = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}}
    training = {"totalSteps": 1, "batchSize": 2}
    made = job(
        tmp_path,
        "job",
        {"algorithm": {"name": "SFT"}, "models": {"actor": actor}, "data": data} | {"training": training},
    )
    sentence = (
        r"job: spec\.models\.actor\.parallelism\.context: is 2, but the attention of BloomForCausalLM cannot be chosen"
    )
    with pytest.raises(SpecError, match=sentence):
        require_possible(
            made, {"actor": ParallelSizes(data=1, context=2)}, {"actor": (made.models()["actor"], str(tmp_path))}
        )


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


def test_flash_is_refused_for_values_narrower_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(EVERY_FAMILY["DeepSeek-V3"]))
    on_gpu: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    with pytest.raises(ConfigError, match=r"and has values as wide as its keys; Auto takes what runs"):
        use_attention(model, "Flash", **on_gpu)
    use_attention(model, "Auto", **on_gpu)
    assert model.config._attn_implementation == "documents_by_sdpa"
