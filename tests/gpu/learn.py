"""The trainer without vLLM, on one device: updates, offload, checkpoints, attention, saved models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training.distributed import device_here, local_shard
from rlhf_trainer.training.models import inner
from rlhf_trainer.training.offload import bytes_held
from rlhf_trainer.workers import rollout
from rlhf_trainer.workers.actor import FIRST_RATIO_LIMIT, ActorWorker
from tests.gpu.actors import actor_of, largest_difference, random_model, read, scored
from tests.gpu.rung import Rung, main
from tests.real_size.step import Case
from tests.trainer.stand_in import GeneratorStandIn

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far two log-probabilities of one token may differ that were computed in another order, by compute type."""


def measure(rung: Rung) -> None:
    """An actor's life."""
    shape = {"shape": "Llama-1M", "prompt": 16, "response": 16} if rung.rehearse else {"shape": "Qwen2.5-0.5B"}
    sizes: dict[str, Any] = {"prompt": 256, "response": 256, "micro_batch_tokens": 2048, **shape}
    case = Case(ranks=1, algorithm="GRPO", rows=8, training={"precision": rung.precision}, **sizes)
    setattr(rollout, "GenerationEngine", GeneratorStandIn)  # noqa: B010
    build = partial(actor_of, folders=random_model(case, rung.folder / "model"), learning_rate=1e-4)
    with rung.part("updates") as found:
        _learns(build(case), case, found, updates=2 if rung.rehearse else 20)
    with rung.part("offload") as found:
        _leaves_and_returns(build(replace(case, offload="All")), case, found)
    with rung.part("optimizer in host memory") as found:
        _learns(build(replace(case, offload="OptimizerInHost")), case, found, updates=3)
    with rung.part("checkpoint") as found:
        _goes_back(build(case), build(case), case, str(rung.folder / "checkpoint"), found)
    with rung.part("attention") as found:
        auto, by_sdpa = build(case), build(replace(case, training={**case.training, "attention": "SDPA"}))
        found["kernels"] = [inner(each.trainer.model.module).config._attn_implementation for each in (auto, by_sdpa)]
        _same(found, read(scored(auto, case)), read(scored(by_sdpa, case)), auto)
    with rung.part("shared prompts") as found:
        actor, of_one_prompt = build(case), replace(case, one_prompt=True)
        actor.save(folder=str(rung.folder / "of one prompt"))
        alone = _by_transformers(actor, of_one_prompt, str(rung.folder / "of one prompt"))
        _same(found, read(scored(actor, of_one_prompt)), alone, actor)
    with rung.part("saved model") as found:
        actor = build(case)
        actor.save(folder=str(rung.folder / "saved"))
        _same(found, read(scored(actor, case)), _by_transformers(actor, case, str(rung.folder / "saved")), actor)
    if rung.rehearse:
        rung.skipped["compiled layers"] = "an actor that generates cannot compile its layers on CPU"
        return
    with rung.part("compiled layers") as found:
        plain, compiled = build(case), build(replace(case, training={**case.training, "compile": True}))
        _same(found, read(scored(plain, case)), read(scored(compiled, case)), plain)
        _learns(compiled, case, found, updates=3)


def _learns(actor: ActorWorker, case: Case, found: dict[str, Any], *, updates: int) -> None:
    """Responses whose advantage is 1 become likelier with each update."""
    recorder.drain()
    batch = scored(actor, case)
    found["log_prob_before"] = float(read(batch).mean())
    for _ in range(updates):
        actor.update_actor(batch)
        batch = scored(actor, case)
    record = merge([recorder.drain()])
    found["log_prob_after"] = float(read(batch).mean())
    found["first_ratio_off_1_by"] = record["ratio/first_max_deviation"]
    found["grad_norm"] = record["grad_norm/policy"]
    assert record["skipped_updates"] == 0
    assert found["log_prob_after"] > found["log_prob_before"], "the responses did not become likelier"
    limit = FIRST_RATIO_LIMIT[actor.setting.compute_dtype]
    assert found["first_ratio_off_1_by"] < limit, f"scoring and update differ by more than {limit}"


def _state(actor: ActorWorker) -> dict[str, Tensor]:
    """Weights and moments in host memory."""
    return {name: local_shard(value).to("cpu", copy=True) for name, value in actor.trainer.state._tensors().items()}


def _require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    changed = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not changed, f"{len(changed)} of {len(one)} tensors differ, the first is {changed[0]}"


def _leaves_and_returns(actor: ActorWorker, case: Case, found: dict[str, Any]) -> None:
    """Shards and moments leave the device and come back as they were; the device has as many bytes less as is said."""
    actor.update_actor(scored(actor, case))
    offloader, module = actor.trainer.offloader, actor.trainer.model.module
    with offloader.in_use(moments=True):
        before, here = _state(actor), bytes_held([*module.parameters(), *offloader._moments()])
        used = _allocated()
    found["bytes"], found["bytes_freed"] = here, used - _allocated()
    assert here > 0
    assert bytes_held([*module.parameters(), *offloader._moments()]) == 0
    with offloader.in_use(moments=True):
        _require_equal(before, _state(actor))
    if device_here().type == "cuda":
        assert abs(found["bytes_freed"] - here) < 0.01 * here, "the device did not get back what was said to leave"


def _allocated() -> int:
    return torch.cuda.memory_allocated() if device_here().type == "cuda" else 0


def _goes_back(actor: ActorWorker, other: ActorWorker, case: Case, uri: str, found: dict[str, Any]) -> None:
    """A checkpoint brings an actor that trained on, and a new one, back to the same bits, and both go on alike."""
    actor.update_actor(scored(actor, case))
    saved = _state(actor)
    actor.begin_checkpoint(uri=uri, copies=True)
    actor.update_actor(scored(actor, case))  # while the files are being written
    actor.end_checkpoint()
    for each in (actor, other):
        each.restore(uri=uri)
        _require_equal(saved, _state(each))
        each.update_actor(scored(each, case))
    _same(found, read(scored(actor, case)), read(scored(other, case)), actor)


def _by_transformers(actor: ActorWorker, case: Case, folder: str) -> Tensor:
    """The log-probabilities of the responses by a model that transformers loads."""
    batch = scored(actor, case)
    dtype = actor.setting.compute_dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device_here()).eval()
    rows = []
    for tokens in batch["tokens"].to(device_here()):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu())
    return torch.stack(rows)[batch["response_mask"][:, 1:] > 0]


def _same(found: dict[str, Any], one: Tensor, other: Tensor, actor: ActorWorker) -> None:
    found["log_probs_differ_by"] = largest_difference(one, other)
    limit = ROUNDING[actor.setting.compute_dtype]
    assert found["log_probs_differ_by"] < limit, f"more than rounding, {limit}"


if __name__ == "__main__":
    main(measure)
