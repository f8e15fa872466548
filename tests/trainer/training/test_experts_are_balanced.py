"""Balance of experts: the auxiliary loss is transformers', and the record says how evenly routers choose."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training import trainer as trainers
from rlhf_trainer.training.sharding import named_parameters
from rlhf_trainer.workers.base import WorkerSetting
from tests.each import each_case
from tests.trainer.families import FAMILIES
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny
from tests.trainer.training.test_experts_over_ranks_learn_what_one_rank_does import LENGTHS, rows, trainer_of, update

COEFFICIENT = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), seed=5, config=copy.deepcopy(FAMILIES["Qwen3-MoE"]))


def gradients(folder: str, layout: ParallelSizes, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """(gradients of an update, what it recorded)."""
    trainer = trainer_of(folder, layout, token_budget=1000, **options)
    found: dict[str, Tensor] = {}

    def clip(*_: Any, **__: Any) -> float:
        for name, each in named_parameters(trainer.model):
            gradient: Any = each.grad
            found[name] = gradient.full_tensor().clone()
        return 0.0

    recorder.drain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers, "clip_gradients", clip)
        update(trainer, 1)
    return found, recorder.drain()


def by_transformers(folder: str, coefficient: float) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Tensor]:
    """(gradients, logits of the routers, mask of the tokens)."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens, mask = rows(1)
    output = model(tokens, attention_mask=mask, output_router_logits=True)
    log_probs = output.logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    loss = -(log_probs * mask[:, 1:]).sum() / float(LENGTHS.sum())
    config = model.config
    loss = loss + coefficient * load_balancing_loss_func(
        output.router_logits, config.num_experts, config.num_experts_per_tok, mask
    )
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    return found, output.router_logits, mask.flatten() > 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_auxiliary_loss_is_that_of_transformers(recomputes: bool, folder: str) -> None:
    expected, _, _ = by_transformers(folder, COEFFICIENT)
    options = {"router_aux_loss": COEFFICIENT, "recomputes": recomputes}
    ((found, _),) = run_kept_ranks(1, gradients, folder, ParallelSizes(data=1), options)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_record_says_how_evenly_experts_are_chosen(folder: str) -> None:
    _, routers, mask = by_transformers(folder, 0.0)
    chances = [logits[mask].softmax(-1) for logits in routers]
    loads = [torch.bincount(each.topk(2).indices.flatten(), minlength=4).float() for each in chances]
    expected = {
        "experts/load_max_over_mean": sum(float(each.max() / each.mean()) for each in loads) / len(loads),
        "experts/routing_entropy": float(torch.stack([-(each * each.log()).sum(-1).mean() for each in chances]).mean()),
        "experts/dropped": 0.0,
    }
    layouts = (ParallelSizes(data=1), ParallelSizes(data=1, pipeline=2, expert=1), ParallelSizes(data=2, expert=2))
    for layout in (*layouts, ParallelSizes(data=1, tensor=2)):
        reports = [report for _, report in run_kept_ranks(layout.world_size, gradients, folder, layout, {})]
        record = merge(reports)
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def coefficient(folder: str, algorithm: str, training: dict[str, Any]) -> float:
    spec: dict[str, Any] = {
        "algorithm": {"name": algorithm},
        "models": {role: {"uri": f"file://{folder}"} for role in ("actor", "critic", "reward")},
        "data": {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}},
        "training": {"totalSteps": 1, **training},
    }
    if algorithm == "SFT":
        spec["models"] = {"actor": spec["models"]["actor"]}
    made = job(Path(folder), "balanced", spec)
    model = made.models()["actor"]
    setting = WorkerSetting(job=made, role="actor", model=model, folder=folder, total_steps=1, layout=None)
    return setting.trainer(setting.language_model())._balance._coefficient


@each_case(
    ("algorithm", "training", "expected"),
    [
        ("SFT", {"batchSize": 8}, 0.001),
        ("SFT", {"batchSize": 8, "routerAuxLoss": 0}, 0.0),
        ("PPO", {"promptBatchSize": 8}, 0.0),
        ("PPO", {"promptBatchSize": 8, "routerAuxLoss": 0.02}, 0.02),
    ],
)
def test_unset_sft_takes_the_loss_of_the_model(
    algorithm: str, training: dict[str, Any], expected: float, folder: str
) -> None:
    assert run_kept_ranks(1, coefficient, folder, algorithm, training) == [expected]


def test_the_loss_weighs_as_much_where_rows_are_cut(folder: str) -> None:
    """Each rank balances its own tokens, so the gradients are alike, not equal."""

    def of_routers(layout: ParallelSizes) -> float:
        with_loss, without = (
            run_kept_ranks(layout.world_size, gradients, folder, layout, {"router_aux_loss": coefficient})[0][0]
            for coefficient in (COEFFICIENT, 0.0)
        )
        routers = [name for name in without if name.endswith("mlp.gate.weight")]
        return float(torch.stack([with_loss[name] - without[name] for name in routers]).norm())

    assert of_routers(ParallelSizes(data=1, context=2)) == pytest.approx(of_routers(ParallelSizes(data=1)), rel=0.1)
