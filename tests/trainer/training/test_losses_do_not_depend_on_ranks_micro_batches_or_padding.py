"""One update of each trained model: one loss and gradient for 1 and 2 ranks, any micro-batch, any padding.

With epsilon 1 and learning rate 1, the first step of AdamW is the gradient itself, nearly: equal weights mean equal
"""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, MistralConfig

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.protocols import THREE_D_PROTO
from rlhf_trainer.telemetry import Report, merge, recorder
from rlhf_trainer.types import Batch, transfers_of
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.critic import CriticWorker
from rlhf_trainer.workers.generating_actor import GeneratingActor
from rlhf_trainer.workers.preference import LabelledActorWorker, OnlinePreferenceActorWorker, PreferenceActorWorker
from rlhf_trainer.workers.reward import CostTrainer, RewardTrainer
from rlhf_trainer.workers.supervised import SupervisedActorWorker
from tests.trainer.families import FAMILIES as MODELS
from tests.trainer.families import SIZES
from tests.trainer.jobs import job
from tests.trainer.measured import SHARED
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.stand_in import GeneratorStandIn
from tests.trainer.tiny import FAMILIES, divisible_config, save_tiny
from tests.trainer.weights import weights_on_first_rank

ROWS, PROMPT = 8, 4
NOISE = (
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "values",
    "token_rewards",
    "rollout_log_probs",
    "cost_values",
    "token_costs",
)
OPTIMIZER = {"learningRate": 1.0, "epsilon": 1.0}
DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}, "maxPromptTokens": 8, "maxResponseTokens": 32}


def sequences(seed: int, extra: int) -> dict[str, Tensor]:
    """Two groups of four rows of different lengths, with everything an update may read; `extra` columns of padding that
    no row needs. Row 2 begins with the whole row 0, and row 7 with 9 tokens of row 6.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 19, 11, 8, 30, 7, 25, 14])
    width = int(lengths.max())
    positions = torch.arange(width)
    attention = (positions < lengths[:, None]).float()
    response = attention * (positions >= PROMPT)
    noise = {name: torch.randn(ROWS, width, generator=generator) * response for name in NOISE}
    fields = {
        "tokens": torch.randint(3, 512, (ROWS, width), generator=generator) * attention.long(),
        "attention_mask": attention,
        "response_mask": response,
        **noise,
    }
    fields["tokens"][:, :PROMPT] = fields["tokens"][[0, 4], :PROMPT].repeat_interleave(4, dim=0)
    for row, earlier, size in ((2, 0, 6), (7, 6, 9)):
        fields["tokens"][row, :size] = fields["tokens"][earlier, :size]
    fields["old_log_probs"] = (fields["old_log_probs"] * 0.3 - 6.0) * response
    likeliest = torch.randn(ROWS, width, 512, generator=generator).log_softmax(2).topk(5)
    fields["teacher_tokens"] = torch.cat([likeliest.indices.float(), likeliest.values], 2) * response[:, :, None]
    fields["rollout_log_probs"] = fields["old_log_probs"] + 0.5 * fields["rollout_log_probs"]
    fields["ref_log_probs"] = (fields["ref_log_probs"] * 0.3 - 6.0) * response
    return {name: pad(field, (0, 0) * (field.dim() - 2) + (0, extra)) for name, field in fields.items()}


def pairs(extra: int) -> dict[str, Tensor]:
    """Pairs of responses to one prompt; the last one is padding of a short batch."""
    chosen, rejected = sequences(1, extra), sequences(2, extra + 2)
    order = torch.tensor([3, 1, 4, 0, 5, 2, 7, 6])
    rejected["tokens"][order, :PROMPT] = chosen["tokens"][:, :PROMPT]
    return {
        "chosen_tokens": chosen["tokens"],
        "chosen_mask": chosen["attention_mask"],
        "rejected_tokens": rejected["tokens"][order],
        "rejected_mask": rejected["attention_mask"][order],
        "valid": torch.tensor([1.0] * 7 + [0.0]),
        "chosen_response_mask": chosen["response_mask"],
        "rejected_response_mask": rejected["response_mask"][order],
        "ref_chosen": torch.arange(8) - 90.0,
        "ref_rejected": -torch.arange(8) - 80.0,
        "chosen_safe": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
        "rejected_safe": torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
    }


def labelled(extra: int) -> dict[str, Tensor]:
    """Responses with labels; the last one is padding of a short batch."""
    pair = pairs(extra)
    return {
        **sequences(1, extra),
        "valid": pair["valid"],
        "desirable": pair["chosen_safe"],
        "reference_point": torch.full((ROWS,), 0.5),
    }


PPO = {"name": "PPO", "entropyCoefficient": 0.01, "kl": {"applyTo": "Loss", "coefficient": 0.1}}
DAPO = {
    "name": "GRPO",
    "aggregation": "TokenMean",
    "clipRangeHigh": 0.28,
    "rolloutCorrection": {"mode": "Mask"},
    "kl": {"estimator": "K2"},
}
GSPO = {"name": "GRPO", "ratio": "Sequence", "clipRange": 3e-4, "clipRangeHigh": 4e-4}
CORRECTED = {
    **GSPO,
    "rolloutCorrection": {"level": "Sequence", "mode": "Clip", "low": 0.2, "high": 4.0, "veto": 0.2, "normalize": True},
}
ROBUST = {"name": "OnlineDPO", "loss": "Robust", "labelSmoothing": 0.1, "lengthNormalized": True}
DISTILLATION = {"name": "Distillation", "divergence": "JensenShannon", "topK": 5, "divergenceCoefficient": 2.0}
RL = {"totalSteps": 4, "promptBatchSize": 4}
GROUPS = {"training": RL, "rollout": {"samplesPerPrompt": 2}}
SPECS: dict[str, dict[str, Any]] = {
    "DAPO": {"algorithm": DAPO, **GROUPS},
    "GSPO": {"algorithm": GSPO, **GROUPS},
    "corrected": {"algorithm": CORRECTED, **GROUPS},
    "RLOO": {"algorithm": {"name": "RLOO", "rolloutCorrection": {"cap": 1.1}}, **GROUPS},
    "Distillation": {"algorithm": DISTILLATION, **GROUPS},
    "SFT": {"algorithm": {"name": "SFT"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "RewardModel": {"algorithm": {"name": "RewardModel"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "CostModel": {"algorithm": {"name": "CostModel"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "DPO": {"algorithm": {"name": "DPO"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "KTO": {"algorithm": {"name": "KTO", "undesirableWeight": 2.0}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "SimPO": {"algorithm": {"name": "SimPO"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "ORPO": {"algorithm": {"name": "ORPO"}, "training": {"totalSteps": 4, "batchSize": ROWS}},
    "OnlineDPO": {"algorithm": ROBUST, **GROUPS},
    "PPO-ptx": {"algorithm": {**PPO, "pretrainCoefficient": 2.0}, "training": {**RL, "promptBatchSize": ROWS}},
    "SafeRLHF": {"algorithm": {"name": "SafeRLHF"}, "training": {**RL, "promptBatchSize": ROWS}},
    "PPO": {"algorithm": PPO, "training": {**RL, "promptBatchSize": ROWS}},
    "warm-up": {"algorithm": {**PPO, "criticWarmupSteps": 2}, "training": {**RL, "promptBatchSize": ROWS}},
}
TRAINED = dict.fromkeys(("PPO", "SafeRLHF"), ("actor", "critic"))
FROZEN = dict.fromkeys(("PPO", "GRPO", "RLOO", "OnlineDPO"), ("reward",)) | {
    "SafeRLHF": ("reward", "cost"),
    "Distillation": ("teacher",),
}
PAIRS = ("RewardModel", "CostModel", "DPO", "SimPO", "ORPO", "OnlineDPO")
FINDS_VALUES = "PPO critic that finds the values"
CASES: dict[str, tuple[str, Role, type, str]] = {
    "SFT": ("SFT", "actor", SupervisedActorWorker, "update_actor"),
    "reward model": ("RewardModel", "reward", RewardTrainer, "update_reward"),
    "PPO actor": ("PPO", "actor", ActorWorker, "update_actor"),
    "DAPO actor": ("DAPO", "actor", ActorWorker, "update_actor"),
    "GSPO actor": ("GSPO", "actor", ActorWorker, "update_actor"),
    "corrected actor": ("corrected", "actor", ActorWorker, "update_actor"),
    "RLOO actor": ("RLOO", "actor", ActorWorker, "update_actor"),
    "distilled actor": ("Distillation", "actor", ActorWorker, "update_actor"),
    "cost model": ("CostModel", "cost", CostTrainer, "update_cost"),
    "DPO actor": ("DPO", "actor", PreferenceActorWorker, "update_actor"),
    "SimPO actor": ("SimPO", "actor", PreferenceActorWorker, "update_actor"),
    "ORPO actor": ("ORPO", "actor", PreferenceActorWorker, "update_actor"),
    "KTO actor": ("KTO", "actor", LabelledActorWorker, "update_actor"),
    "online DPO actor": ("OnlineDPO", "actor", OnlinePreferenceActorWorker, "update_actor"),
    "PPO-ptx actor": ("PPO-ptx", "actor", ActorWorker, "update_actor"),
    "PPO-ptx report": ("PPO-ptx", "actor", ActorWorker, "compute_loss"),
    "cost critic": ("SafeRLHF", "cost_critic", CriticWorker, "update_critic"),
    "PPO critic": ("PPO", "critic", CriticWorker, "update_critic"),
    FINDS_VALUES: ("PPO", "critic", CriticWorker, "update_critic"),
}
ALIKE = (
    *("DAPO actor", "GSPO actor", "corrected actor", "RLOO actor", "cost model", "SimPO actor", "ORPO actor"),
    *("online DPO actor", "PPO-ptx report", "cost critic"),
)
"""Slow cases, whose worker and method another case has, too."""
WARM_UP: dict[str, tuple[str, Role, type, str]] = {
    "actor that waits": ("warm-up", "actor", ActorWorker, "update_actor"),
    "critic that warms up": ("warm-up", "critic", CriticWorker, "update_critic"),
}
"""Cases whose update depends on the step."""


def worker_of(
    case: str,
    folder: str,
    layout: ParallelSizes,
    *,
    budget: int,
    extra: int = 0,
    mini_batch: int | None = 4,
    share: bool = True,
    **of_model: Any,
) -> tuple[Any, Callable[[int], None]]:
    """(a case's worker, a function of a step's number that makes one update on this rank's rows)."""
    algorithm, role, worker_class, method = (CASES | WARM_UP)[case]
    setattr(rollout, "GenerationEngine", GeneratorStandIn)  # noqa: B010
    uri = f"file://{folder}"
    name = SPECS[algorithm]["algorithm"]["name"]
    trained = {"uri": uri, "optimizer": OPTIMIZER, **of_model}
    models = dict.fromkeys(TRAINED.get(name, (role,)), trained)
    models |= {each: {"uri": uri} for each in FROZEN.get(name, ())}
    data = {**DATA, "pretrain": DATA["train"]} if algorithm == "PPO-ptx" else DATA
    spec = {**SPECS[algorithm], "models": models, "data": data}
    # ranks balance each its own tokens
    options = {"microBatchTokens": budget, "sharePrompts": share, "routerAuxLoss": 0}
    spec["training"] = {**spec["training"], **options}
    if "promptBatchSize" in spec["training"]:
        spec["training"]["miniBatchSize"] = mini_batch
    made = job(Path(folder), f"job-{dist.get_rank()}", spec)
    arguments: dict[str, Any] = {"max_sequences": 8} if issubclass(worker_class, GeneratingActor) else {}
    arguments |= {"values_by_update": True} if case == FINDS_VALUES else {}
    setting = WorkerSetting(job=made, role=role, model=made.models()[role], folder=folder, total_steps=4, layout=layout)
    worker = worker_class(setting, **arguments)
    fields = pairs(extra) if name in PAIRS else sequences(1, extra)
    fields = labelled(extra) if name == "KTO" else fields
    if algorithm == "PPO-ptx":
        text = sequences(7, 2 * extra)
        names = ("tokens", "attention_mask", "response_mask")
        fields |= {f"pretrain_{each}": text[each][torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])] for each in names}
    rows = THREE_D_PROTO.distribute(layout, ROWS)[dist.get_rank()]
    if name == "GRPO":
        fields["response_mask"][5] = 0.0  # a response that dynamic sampling leaves out
    if name in ("SimPO", "ORPO"):
        del fields["ref_chosen"], fields["ref_rejected"]
    reads = transfers_of(worker_class, {"setting": setting, **arguments})[method].fields_read(fields)
    here = {name: fields[name][rows.start : rows.stop] for name in reads}

    def update_once(step: int) -> None:
        with recorder.counting((dist.get_rank(),) in THREE_D_PROTO.collect(layout)):
            getattr(worker, method)(Batch(step=step, start=rows.start, size=len(rows), fields=here))

    return worker, update_once


def update(
    case: str,
    folder: str,
    budget: int,
    extra: int,
    recompute: bool,
    mini_batch: int | None,
    layout: ParallelSizes,
    share: bool = True,
    step: int = 1,
) -> tuple[Report, dict[str, Tensor]]:
    """One update on this rank's rows: what was measured, and on rank 0 the whole weights."""
    options: dict[str, Any] = {"budget": budget, "extra": extra, "mini_batch": mini_batch, "share": share}
    worker, update_once = worker_of(case, folder, layout, **options, gradientCheckpointing=recompute)
    recorder.drain()
    update_once(step)
    return recorder.drain(), weights_on_first_rank(worker.trainer.model)


def measured(
    case: str,
    folder: str,
    *,
    ranks: int = 1,
    layout: ParallelSizes | None = None,
    budget: int = 100_000,
    extra: int = 0,
    recompute: bool = False,
    mini_batch: int | None = 4,
    share: bool = True,
) -> Any:
    """(what was measured, the weights) after the updates of a step; RL has mini-batches of 4 or as said, which have two
    rows of each group.
    """
    layout = layout or ParallelSizes(data=ranks)
    results = run_kept_ranks(
        layout.world_size, update, case, folder, budget, extra, recompute, mini_batch, layout, share
    )
    record = merge(report for report, _ in results)
    waste = record.pop("padding/waste")
    assert waste == 0.0 or layout.world_size > 1, "only ranks that wait for others, and pipelines, have padding"
    return {name: value for name, value in record.items() if not name.startswith(SHARED)}, results[0][1]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ALIKE else ()) for case in CASES]
)
def test_an_update_is_the_same_however_it_is_cut(case: str, tmp_path: Path) -> None:
    labels = None if CASES[case][1] == "actor" else 1
    folder = save_tiny(tmp_path / "model", seed=3, labels=labels)
    record, weights = measured(case, folder, ranks=1, budget=100_000, share=False)
    variants: dict[str, dict[str, Any]] = {
        "prompts shared": {"ranks": 1, "budget": 100_000},
        "micro-batches of one row": {"ranks": 1, "budget": 1},
        "more padding": {"ranks": 1, "budget": 64, "extra": 9},
        "two ranks, small micro-batches, recomputed activations": {"ranks": 2, "budget": 40, "recompute": True},
    }
    for name, variant in variants.items():
        require_same(name, measured(case, folder, **variant), (record, weights))


def require_same(name: str, one: Any, other: Any) -> None:
    """Equal measurements and weights, up to rounding."""
    (record, weights), (expected, expected_weights) = one, other
    assert record == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert weights.keys() == expected_weights.keys()
    for weight, value in expected_weights.items():
        torch.testing.assert_close(weights[weight], value, rtol=0, atol=2e-6, msg=f"{name}: {weight}")


SMALL_LAYOUTS = [
    ParallelSizes(data=1, tensor=2),
    ParallelSizes(data=1, pipeline=2),
    ParallelSizes(data=2, pipeline=2, tensor=2),
    ParallelSizes(data=4, replicas=2),
]
LARGE_LAYOUTS = [
    ParallelSizes(data=d, pipeline=p, tensor=t, replicas=r)
    for p, t, d, r in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2))
    if 1 < p * t * d <= 8 and d % r == 0
]
CUT = ("cost model", "PPO critic that finds the values", "PPO-ptx actor", "PPO-ptx report", "distilled actor")
"""Kinds of loss that `test_layouts_learn_what_one_rank_does` lacks: of scored pairs, two texts and the vocabulary."""
FAST = {"PPO critic that finds the values": SMALL_LAYOUTS[0], "distilled actor": SMALL_LAYOUTS[0]}
"""The layout of a case that the fast tests cut it by."""


def named(layout: ParallelSizes) -> str:
    return str(layout) + f" in {layout.replicas}" * (layout.replicas > 1)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if FAST.get(case) == layout else pytest.mark.slow)
        for case, layout in product(CUT, SMALL_LAYOUTS)
    ],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_an_update_is_the_same_for_any_p_t_d(case: str, layout: ParallelSizes, tmp_path: Path) -> None:
    labels = None if CASES[case][1] == "actor" else 1
    folder = save_tiny(tmp_path / "model", seed=3, labels=labels, config=divisible_config())
    whole = measured(case, folder, share=False)
    require_same(named(layout), measured(case, folder, layout=layout, budget=40), whole)


THREE_HEADS = MistralConfig(**SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1}, sliding_window=6)
CONTEXTS: list[tuple[str, str, ParallelSizes]] = [
    ("PPO critic that finds the values", "three heads and a window", ParallelSizes(data=1, context=2)),
    ("SFT", "Gemma 2", ParallelSizes(data=1, context=2, tensor=2)),
    ("DAPO actor", "six heads", ParallelSizes(data=1, context=4)),
    ("GSPO actor", "eight heads", ParallelSizes(data=2, context=2)),
    ("PPO-ptx actor", "eight heads", ParallelSizes(data=2, context=2, replicas=2)),
    ("cost model", "eight heads", ParallelSizes(data=1, context=2, pipeline=2, tensor=2)),
    ("distilled actor", "Gemma 2", ParallelSizes(data=1, context=2, tensor=2)),
    ("SFT", "Gemma 3 (text)", ParallelSizes(data=1, context=4)),
    ("SFT", "Cohere 2", ParallelSizes(data=2, context=2, tensor=2)),
]
"""Cases, models and layouts in which ranks share rows; the first three are fast. The first and the third gather keys
and values, as their heads do not divide; the others exchange heads, of which Gemma 2 repeats the key heads."""
OF_CONTEXTS = {**MODELS, "three heads and a window": THREE_HEADS, "six heads": MODELS["SmolLM"]}


@pytest.mark.parametrize(
    ("case", "model", "layout"),
    [pytest.param(*each, marks=pytest.mark.slow if number > 1 else ()) for number, each in enumerate(CONTEXTS)],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_an_update_is_the_same_if_ranks_share_rows(
    case: str, model: str, layout: ParallelSizes, tmp_path: Path
) -> None:
    labels = None if CASES[case][1] == "actor" else 1
    config = copy.deepcopy(OF_CONTEXTS.get(model, divisible_config()))
    folder = save_tiny(tmp_path / "model", seed=3, labels=labels, config=config)
    found = measured(case, folder, layout=layout, budget=40, recompute=layout.tensor > 1)
    require_same(named(layout), found, measured(case, folder, share=False))


@pytest.fixture(scope="module", params=[f"{family}, {head}" for family in FAMILIES for head in ("tied", "untied")])
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(folder of a model, what one rank measured and made of it)."""
    family, head = request.param.split(", ")
    config = divisible_config(family, tied=head == "tied")
    folder = save_tiny(tmp_path_factory.mktemp("model"), seed=3, config=config)
    return folder, measured("SFT", folder, share=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGE_LAYOUTS, ids=named)
def test_every_family_learns_the_same_in_every_layout(learnt: tuple[str, Any], layout: ParallelSizes) -> None:
    folder, whole = learnt
    require_same(named(layout), measured("SFT", folder, layout=layout, budget=40), whole)


MIXTURES = ("Qwen3-MoE", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Mixtral", "Qwen2-MoE", "OLMoE")))


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_learns_the_same_on_two_ranks(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3, config=copy.deepcopy(MODELS[family]))
    one = measured("SFT", folder, share=False)
    require_same("two ranks", measured("SFT", folder, ranks=2, budget=40, recompute=True), one)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in one[1].items():
        moved = (weight - before[name]).abs()
        assert moved.amax(tuple(range(1, moved.ndim)) if ".experts." in name else ()).min() > 1e-4, name


def test_an_update_moves_the_weights(tmp_path: Path) -> None:
    """Else the comparison above would hold for a trainer that does nothing."""
    folder = save_tiny(tmp_path / "model", seed=3)
    _, weights = measured("SFT", folder, ranks=1, budget=100_000)
    from safetensors.torch import load_file

    before = load_file(str(tmp_path / "model" / "model.safetensors"))
    assert all((weights[name] - before[name]).abs().max() > 1e-4 for name in before)
