"""Routers take the experts that the generator chose: log-probabilities and gradients are those of a plain loop."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, EnvironmentProblem
from rlhf_trainer.expert_rows import ROUTED, ExpertRows
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training.model_input import ModelInput, TokenBatch
from rlhf_trainer.training.models import LanguageModel, inner
from rlhf_trainer.training.routing import RoutingReplay
from rlhf_trainer.training.sharding import layers_of
from rlhf_trainer.types import Batch
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from tests.each import each_case
from tests.trainer.families import FAMILIES
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_losses_do_not_depend_on_ranks_micro_batches_or_padding import DATA, sequences
from tests.trainer.training.test_packed_texts_are_read_as_if_alone import groups, ready, tree
from tests.trainer.weights import weights_on_first_rank

MIXTURES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE")


def drawn_experts(config: Any, lengths: Tensor, width: int) -> Tensor:
    """Random experts of all tokens but the last of each row: uint8 [rows, width, E]; those of dense layers are none."""
    generator, rows = torch.Generator().manual_seed(3), ExpertRows.of(config)
    count = getattr(config, "num_local_experts", None) or config.num_experts
    shape = (len(lengths), width, rows.layers)
    drawn = torch.rand(*shape, count, generator=generator).topk(rows.chosen).indices
    drawn[:, :, getattr(config, "mlp_only_layers", None) or []] = -1
    drawn[torch.arange(width) >= (lengths - 1)[:, None]] = -1
    return rows.encode(drawn.flatten(0, 1)).view(len(lengths), width, -1)


def replayed_text(config: Any, *, shift: int = 0) -> TokenBatch:
    """Rows of which two share a prompt, with experts."""
    text = groups()[0]
    experts = drawn_experts(config, text.lengths, text.tokens.shape[1])
    experts[3, :5] = experts[0, :5]
    return replace(text, read=torch.ones(text.tokens.shape), experts=experts.roll(shift, dims=1))


def pair(
    family: str, *, recomputes: bool = False, chosen: int = 2
) -> tuple[LanguageModel, PreTrainedModel, RoutingReplay]:
    """(model of the trainer, transformers' model with the same weights, replay of the first)."""
    torch.manual_seed(0)
    config = deepcopy(FAMILIES[family])
    config.num_experts_per_tok = chosen
    plain = AutoModelForCausalLM.from_config(config).float()
    model = LanguageModel(deepcopy(plain))
    if recomputes:
        layers = layers_of(model)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=layers.__contains__)
    return ready(model).eval(), plain.eval(), RoutingReplay(model)


def mixture_by_definition(block: Any, given: Tensor, hidden: Tensor) -> Tensor:
    """A mixture's layer token by token; given: experts [tokens, chosen], -1 where the router chooses."""
    states = hidden[0]
    shares = (states @ block.gate.weight.T).softmax(-1)
    outputs = []
    for state, share, experts in zip(states, shares, given, strict=True):
        chosen = experts if experts[0] >= 0 else share.topk(len(experts)).indices
        weights = share[chosen]
        if getattr(block.gate, "norm_topk_prob", True):
            weights = weights / weights.sum()
        total = torch.zeros_like(state)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            total = total + weight * (block.experts.down_proj[expert] @ (block.experts.act_fn(gate) * up))
        outputs.append(total)
    found = torch.stack(outputs)
    if hasattr(block, "shared_expert"):
        found = found + block.shared_expert_gate(states).sigmoid() * block.shared_expert(states)
    return found[None]


def plain_log_probs(model: Any, text: TokenBatch) -> Tensor:
    """Log-probabilities [rows, T] of each row alone, by loops over tokens and experts."""
    rows, found = ExpertRows.of(model.config), torch.zeros(text.tokens.shape)
    assert text.experts is not None
    for row, length in enumerate(text.lengths.tolist()):
        if length < 2:
            continue
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "experts"):
                given = rows.decode(text.experts[row, :length], number)
                layer.mlp.forward = partial(mixture_by_definition, layer.mlp, given)
        logits = model(text.tokens[row : row + 1, :length]).logits[0, :-1] / text.temperature
        targets = text.tokens[row, 1:length, None]
        found = found.index_put(
            (torch.tensor(row), torch.arange(1, length)), logits.log_softmax(-1).gather(1, targets)[:, 0]
        )
    return found


def log_probs(model: LanguageModel, text: TokenBatch) -> Tensor:
    given = ModelInput.of([text])
    found: Tensor = model(given.tokens, given).log_probs
    return found


@each_case("family", MIXTURES)
def test_gradients_are_those_of_a_loop_given_the_experts(family: str) -> None:
    model, plain, _ = pair(family)
    text = replayed_text(plain.config)
    expected, found = plain_log_probs(plain, text), log_probs(model, text)
    assert_close(found, expected, rtol=0, atol=2e-5)
    factor = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    for each in (expected, found):
        torch.autograd.backward((each * factor).sum())
    of_loop = {name: parameter.grad for name, parameter in plain.named_parameters()}
    routers = [name for name in of_loop if name.endswith("gate.weight")]
    assert all(float(of_loop[name].norm()) > 1e-3 for name in routers), "a router learns"
    for name, parameter in inner(model).named_parameters():
        assert_close(parameter.grad, of_loop[name], rtol=1e-4, atol=2e-5, msg=f"{name} learns otherwise")
    moved = log_probs(model, replayed_text(plain.config, shift=1))
    assert float((moved - expected).detach().abs().max()) > 0.01, "experts of the token before are others"


def test_a_recomputed_layer_takes_the_same_experts() -> None:
    """Two micro-batches are under way, as in a pipeline: their backward passes come after both forward passes."""
    gradients = []
    for recomputes in (False, True):
        model, plain, _ = pair("Qwen3-MoE", recomputes=recomputes)
        text = replayed_text(plain.config)
        assert text.experts is not None
        halves = [replace(text, experts=text.experts.flip(0)), text]
        for each in [log_probs(model, half).sum() for half in halves]:
            torch.autograd.backward(each)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(gradients[1], gradients[0])


def test_a_prompts_first_row_decides_and_others_are_counted() -> None:
    model, plain, _ = pair("Qwen3-MoE")
    text = replayed_text(plain.config)
    expected = log_probs(model, text)
    assert text.experts is not None
    other = text.experts.clone()
    other[3, 1:3] = other[3, 1:3].flip(0)
    assert not torch.equal(other, text.experts)
    recorder.drain()
    assert_close(log_probs(model, replace(text, experts=other)), expected)
    assert merge([recorder.drain()]) == {"routing/prompts_differ": 2 / 5}


def test_a_shared_token_has_the_experts_of_a_text_that_goes_on() -> None:
    """The generator never read a text's last token, but that of a longer text which begins with the whole first."""
    model, plain, _ = pair("Qwen3-MoE")
    text, other = tree(4)
    tokens, lengths = torch.cat([text.tokens, other.tokens]), torch.cat([text.lengths, other.lengths])
    experts = drawn_experts(plain.config, torch.full((len(tokens),), tokens.shape[1] + 1), tokens.shape[1])
    by_prefix: dict[tuple[int, ...], Tensor] = {}
    for row, length in enumerate(lengths.tolist()):
        for stop in range(length):
            prefix = tuple(tokens[row, : stop + 1].tolist())
            experts[row, stop] = by_prefix.setdefault(prefix, experts[row, stop])
    experts[torch.arange(tokens.shape[1]) >= (lengths - 1)[:, None]] = 0
    text = TokenBatch(tokens=tokens, lengths=lengths, read=torch.ones(tokens.shape), experts=experts)
    recorder.drain()
    given, whole = (ModelInput.of([text], share=share) for share in (True, False))
    assert merge([recorder.drain()]) == {"routing/prompts_differ": 0.0}
    assert given.tokens.numel() < whole.tokens.numel()
    assert_close(model(given.tokens, given).log_probs, model(whole.tokens, whole).log_probs)


def judged(limit: float, per_token: int = 2) -> tuple[str, dict[str, float]]:
    """Return a rank's (error, measurements); on the second rank the generator chose other experts for 3 tokens."""
    model, plain, replay = pair("Qwen3-MoE", chosen=per_token)
    rows, chosen = ExpertRows.of(plain.config), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *given: chosen.append(given[2][2])) for layer in plain.model.layers
    ]
    tokens = torch.randint(3, 500, (1, 12), generator=torch.Generator().manual_seed(0))
    plain(tokens)
    for hook in hooks:
        hook.remove()
    own = rows.encode(torch.stack(chosen, dim=1))[None]
    own[:, -1] = 0
    if dist.get_rank() == 1:
        own.view(12, 2, 2)[4:7, 1] = own.view(12, 2, 2)[4:7, 1] % 4 + 1
    text = TokenBatch(tokens=tokens, lengths=torch.tensor([12]), read=torch.ones(1, 12), experts=own)
    recorder.drain()
    error = ""
    try:
        with replay.measured(limit=limit):
            log_probs(model, text)
    except EnvironmentProblem as problem:
        error = str(problem)
    record = merge([recorder.drain()])
    log_probs(model, text)
    assert "routing/differs" not in merge([recorder.drain()]), "an update's pass is by other weights"
    return error, record


def test_other_choices_of_routers_are_judged_over_all_ranks() -> None:
    assert run_kept_ranks(1, judged, 0.0)[0] == ("", {"routing/differs": 0.0})
    assert run_kept_ranks(1, judged, 0.0, 1)[0] == ("", {"routing/differs": 0.0}), (
        "the generator never read a last token"
    )
    for error, record in run_kept_ranks(2, judged, 3 / 44):
        assert not error
        assert record["routing/differs"] == 3 / 44
    for error, _ in run_kept_ranks(2, judged, 2 / 44):
        assert error.startswith("for 7% of tokens and layers the generator chose other experts")


def update(
    folder: str,
    layout: ParallelSizes,
    *,
    budget: int = 10_000,
    extra: int = 0,
    favoured: bool = False,
    **of_actor: Any,
) -> Any:
    """(what was measured, old log-probabilities, weights) of an update of GRPO on this rank's rows.

    favoured: whether the generator chose the first two experts for all tokens.
    """
    setattr(rollout, "GenerationEngine", GeneratorStandIn)  # noqa: B010
    optimizer = {"learningRate": 1.0, "epsilon": 1.0}
    models: dict[str, Any] = {"actor": {"uri": f"file://{folder}", "optimizer": optimizer, **of_actor}}
    training = {"totalSteps": 4, "promptBatchSize": 4, "microBatchTokens": budget, "miniBatchSize": 4}
    sampling = {"samplesPerPrompt": 2, "routing": "Replay"}
    spec = {"algorithm": {"name": "GRPO"}, "training": training, "rollout": sampling, "data": DATA}
    models["reference"] = models["reward"] = {"uri": f"file://{folder}"}
    made = job(Path(folder), f"job-{dist.get_rank()}", {**spec, "models": models})
    setting = WorkerSetting(
        job=made, role="actor", model=made.models()["actor"], folder=folder, total_steps=4, layout=layout
    )
    worker = ActorWorker(setting, max_sequences=8)
    worker._knows_routing = True  # the experts are drawn
    fields = sequences(1, extra)
    lengths = fields["attention_mask"].sum(1).long()
    experts = drawn_experts(setting.config(), lengths, int(lengths.max()))
    if favoured:
        rows = ExpertRows.of(setting.config())
        favourites = torch.arange(rows.chosen).expand(experts[0].shape[0], rows.layers, -1)
        experts = rows.encode(favourites) * (experts > 0).any(2, keepdim=True)
    for first in (0, 4):
        experts[first : first + 4, :4] = experts[first, :4]
    experts[2, :5], experts[7, :9] = experts[0, :5], experts[6, :9]
    fields |= {ROUTED: pad(experts, (0, 0, 0, extra)), "policy_version": torch.zeros_like(fields["response_mask"])}
    mine = THREE_D_PROTO.distribute(layout, len(experts))[dist.get_rank()]
    batch = Batch(
        step=1,
        start=mine.start,
        size=len(mine),
        fields={name: field[mine.start : mine.stop] for name, field in fields.items()},
    )
    recorder.drain()
    with recorder.counting((dist.get_rank(),) in THREE_D_PROTO.collect(layout)):
        old = worker.compute_log_prob(batch)["old_log_probs"]
        worker.update_actor(batch)
    return recorder.drain(), old, weights_on_first_rank(worker.trainer.model)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of a mixture, and of one whose second layer is dense."""
    path = tmp_path_factory.mktemp("mixtures")
    names = ("Qwen3-MoE", "Qwen2-MoE")
    return {name: save_tiny(path / name, seed=1, config=deepcopy(FAMILIES[name])) for name in names}


LORA = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
CUTS: dict[str, tuple[str, ParallelSizes, dict[str, Any]]] = {
    "small micro-batches on two ranks": ("Qwen3-MoE", ParallelSizes(data=2), {"budget": 40, "extra": 7}),
    "experts on two ranks": ("Qwen3-MoE", ParallelSizes(data=2, expert=2), {"gradientCheckpointing": True}),
    "rows on two ranks": ("Qwen3-MoE", ParallelSizes(data=1, context=2), {"gradientCheckpointing": True}),
    "a stage of dense layers": ("Qwen2-MoE", ParallelSizes(data=1, pipeline=2), {"budget": 40}),
    "an adapter on tensor-parallel ranks": ("Qwen3-MoE", ParallelSizes(data=1, tensor=2), LORA),
    "all at once": ("Qwen3-MoE", ParallelSizes(data=1, tensor=2, context=2, expert=2), {"gradientCheckpointing": True}),
}


FAST = ("small micro-batches on two ranks", "rows on two ranks", "a stage of dense layers")


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=[pytest.mark.slow] * (cut not in FAST)) for cut in CUTS])
def test_ranks_micro_batches_and_padding_change_nothing(cut: str, mixtures: dict[str, str]) -> None:
    family, layout, options = CUTS[cut]
    plain = partial(update, **{name: value for name, value in options.items() if name == "lora"})
    ((report, old, weights),) = run_kept_ranks(1, plain, mixtures[family], ParallelSizes(data=1))
    found = run_kept_ranks(layout.world_size, partial(update, **options), mixtures[family], layout)
    rows = [found[rank][1] for (rank,) in THREE_D_PROTO.collect(layout)]
    joined = torch.cat([pad(each, (0, old.shape[1] - each.shape[1])) for each in rows])
    assert_close(joined, old, rtol=1e-4, atol=1e-5)
    assert_close(found[0][2], weights, rtol=1e-4, atol=1e-5)
    record, other = merge([report]), merge([each for each, *_ in found])
    assert other["routing/differs"] == pytest.approx(record["routing/differs"], abs=0.01), "prompts count once a pass"
    assert record["routing/differs"] > 0.5
    assert record["routing/prompts_differ"] == other["routing/prompts_differ"] == 0


def test_the_load_of_experts_is_that_of_the_generators_choice(mixtures: dict[str, str]) -> None:
    for layout in (ParallelSizes(data=1), ParallelSizes(data=2, expert=2)):
        found = run_kept_ranks(layout.world_size, partial(update, favoured=True), mixtures["Qwen3-MoE"], layout)
        load = merge([each for each, *_ in found])["experts/load_max_over_mean"]
        assert 1.8 < load <= 2.0, "two of four experts have all tokens but the last ones, which the router sends"


def refused(folder: str) -> str:
    """The sentence with which an actor whose generator names the experts of other tokens is refused."""
    import rlhf_trainer.workers.generating_actor as actor

    setattr(actor.GeneratingActor, "_knows_routing", property(lambda _: False, lambda *_: None))  # noqa: B010
    try:
        update(folder, ParallelSizes(data=1))
    except EnvironmentProblem as error:
        return str(error)
    return ""


def test_experts_of_other_tokens_are_refused_in_a_sentence(mixtures: dict[str, str]) -> None:
    (sentence,) = run_kept_ranks(1, refused, mixtures["Qwen3-MoE"])
    assert "of tokens and layers the generator chose other experts than the trainer's routers" in sentence


def test_only_mixtures_of_known_routers_are_replayed(mixtures: dict[str, str], tmp_path: Path) -> None:
    asked: dict[str | None, dict[str, str]] = {None: {}}
    asked |= {each: {"routing": each} for each in ("Replay", "Recompute")}
    dense = save_tiny(tmp_path / "dense", seed=1)

    def replays(folder: str, routing: str | None) -> bool:
        models: dict[str, Any] = {role: {"uri": f"file://{folder}"} for role in ("actor", "reference", "reward")}
        models["actor"] = {**models["actor"], "optimizer": {}}
        rollout: dict[str, Any] = {"samplesPerPrompt": 2, **asked[routing]}
        training = {"totalSteps": 4, "promptBatchSize": 4}
        spec = {"algorithm": {"name": "GRPO"}, "training": training, "rollout": rollout, "models": models, "data": DATA}
        made = job(tmp_path, "job", spec)
        setting = WorkerSetting(job=made, role="actor", model=made.models()["actor"], folder=folder, total_steps=4)
        return setting.must_replay_routing()

    assert [replays(mixtures["Qwen3-MoE"], each) for each in asked] == [True, True, False]
    assert [replays(dense, each) for each in (None, "Recompute")] == [False, False]
    with pytest.raises(ConfigError, match=r"^job: spec\.rollout\.routing: is Replay, but .*dense has no experts"):
        replays(dense, "Replay")
    FAMILIES["DeepSeek-V3"].save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"is Replay, but .*other has no routers that the trainer knows$"):
        replays(str(tmp_path / "other"), "Replay")
