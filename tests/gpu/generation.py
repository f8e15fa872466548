"""vLLM in the trainer's process: new weights round by round, the tokens that they say, and the bytes of sleep and wake.

The variant is what models compute in, BF16 on a GPU and FP32 in a rehearsal by itself, or `invariant`: vLLM's
batch-invariant mode, in which a response depends on its own prompt and seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_trainer.generation.vllm_engine import Response, bytes_used, response_seed
from rlhf_trainer.telemetry import merge, recorder
from rlhf_trainer.training.distributed import device_here
from rlhf_trainer.types import Batch
from rlhf_trainer.workers.actor import ActorWorker
from rlhf_trainer.workers.generating_actor import ROLLOUT_KL_LIMIT
from tests.gpu.actors import actor_of, engine_of, random_model
from tests.gpu.rung import Rung, main
from tests.real_size.step import Case
from tests.trainer.generation.test_vllm_writes_what_the_trained_weights_say import (
    NEW_TOKENS,
    first_difference_gap,
    prompts,
)
from tests.trainer.weights import full_weights

ROUNDS, REHEARSED_ROUNDS = 5, 3
TOO_CLOSE = {("cpu", "FP32"): 1e-4, ("cuda", "FP32"): 2e-2, ("cuda", "BF16"): 0.3}
"""Two logits that are closer than this may change places: GPUs multiply float32 by TF32 where a kernel asks for it."""
GROWTH = 64 * 2**20
"""Bytes by which what the engine holds asleep may grow from the second round to the last."""


def measure(rung: Rung) -> None:
    """An actor on a tiny model: update, reshard and generate in turn."""
    if not rung.can_generate():
        return
    is_invariant = rung.variant == "invariant"
    if is_invariant and rung.rehearse:
        rung.skipped["batch-invariant mode"] = "its kernels need a GPU"
    elif is_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    precision = rung.precision if is_invariant else rung.variant or rung.precision
    case = Case(
        shape="Llama-1M",
        ranks=1,
        algorithm="GRPO",
        rows=64,
        prompt=192,
        response=NEW_TOKENS,
        training={"precision": precision},
    )
    with rung.part("start") as found:
        used = bytes_used(device_here())
        folders = random_model(case, rung.folder / "model")
        share = rung.rollout | ({} if rung.rehearse else {"gpuMemoryUtilization": 0.2})
        actor = actor_of(case, folders, learning_rate=3e-3, rollout=share)
        found["bytes_asleep"] = engine_of(actor).bytes_held()
        found["driver_bytes"] = bytes_used(device_here()) - used
    if rung.failed:
        return
    close = TOO_CLOSE[device_here().type, precision]
    before: list[list[int]] = []
    numbers = range(1, 1 + (REHEARSED_ROUNDS if rung.rehearse or is_invariant else ROUNDS))
    for number in numbers:
        with rung.part(f"round {number}") as found:
            before = _round(actor, found, close, before)
    with rung.part("growth") as found:
        rounds = [rung.figures[f"round {number}"] for number in numbers]
        found["bytes"] = rounds[-1]["bytes_asleep"] - rounds[1]["bytes_asleep"]
        assert found["bytes"] <= GROWTH, "the engine holds more with each round"
    with rung.part("other batches") as found:
        _in_other_batches(actor, found)
        if is_invariant and not rung.rehearse:
            assert not any(rows for name, rows in found.items() if name != "rows"), "a response depends on its batch"


def _round(actor: ActorWorker, found: dict[str, Any], close: float, before: list[list[int]]) -> list[list[int]]:
    """Reshard, generate, sleep, wake, score and learn; returns the likeliest responses."""
    engine = engine_of(actor)
    recorder.drain()
    actor.reshard()
    found["reshard_seconds"] = round(sum(span.end - span.start for span in recorder.drain().spans), 3)
    found["bytes_awake"], counted = engine.bytes_held(), engine._call("bytes_held")
    found["bytes_of_weights_and_cache"] = counted
    greedy = _responses(actor, greedy=True)
    tokens = [list(each.tokens) for each in greedy]
    found["rows_apart"], found["largest_gap"] = _apart(actor, greedy)
    found["rows_changed"] = sum(one != other for one, other in zip(tokens, before, strict=False))
    found["bytes_freed"] = engine.sleep()
    found["bytes_asleep"] = engine.bytes_held()
    assert actor._weights
    actor._weights.held_version = -1
    actor.reshard()
    again = [list(each.tokens) for each in _responses(actor, greedy=True)]
    sampled, same = (_responses(actor, greedy=False) for _ in range(2))
    found["kl"] = _learn(actor)
    assert found["largest_gap"] < close, f"differs from transformers where logits are more than {close} apart"
    assert tokens == again, "other tokens after sleep and wake"
    assert [each.tokens for each in sampled] == [each.tokens for each in same], "a seed gives other tokens"
    assert not before or found["rows_changed"] > len(tokens) // 4, "new weights write what the old ones wrote"
    assert found["bytes_freed"] > 0.95 * counted > 0, "sleep frees less than weights and cache"
    limit = ROLLOUT_KL_LIMIT[actor.setting.compute_dtype]
    assert found["kl"] < limit, f"trainer and generator disagree by more than {limit} a token"
    return tokens


def _responses(actor: ActorWorker, *, greedy: bool, rows: Sequence[int] | None = None) -> list[Response]:
    """The responses of all prompts or of some, in one batch."""
    asked = prompts()
    rows = range(len(asked)) if rows is None else rows
    seeds = [response_seed(7, 1, row) for row in rows]
    chosen = [asked[row] for row in rows]
    found: list[Response] = engine_of(actor).generate(chosen, seeds, max_tokens=NEW_TOKENS, greedy=greedy)
    return found


def _in_other_batches(actor: ActorWorker, found: dict[str, Any]) -> None:
    """Count the sampled responses that differ in a batch of another order, and in batches of three and one."""
    actor.reshard()  # an update puts the generator to sleep
    tokens = [each.tokens for each in _responses(actor, greedy=False)]
    found["rows"] = rows = len(tokens)
    backwards = [each.tokens for each in _responses(actor, greedy=False, rows=range(rows)[::-1])]
    found["differ backwards"] = sum(one != other for one, other in zip(tokens, backwards[::-1], strict=True))
    for size in (3, 1):
        few = range(rows - 8 * size, rows)
        split = [few[start : start + size] for start in range(0, len(few), size)]
        again = [each.tokens for part in split for each in _responses(actor, greedy=False, rows=part)]
        found[f"differ by {size}"] = sum(tokens[row] != other for row, other in zip(few, again, strict=True))


def _apart(actor: ActorWorker, greedy: list[Response]) -> tuple[int, float]:
    """How many responses differ from those of transformers, in float32 on the CPU with the weights as they are sent.

    Also the largest gap of the two best logits where one begins to.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(actor.setting.folder)).float().eval()
    weights = full_weights(actor.trainer.model)
    sent = {name: weight.to(actor.setting.compute_dtype).float() for name, weight in weights.items()}
    missing, unknown = model.load_state_dict(sent, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    found = (first_difference_gap(model, *each) for each in zip(prompts(), greedy, strict=True))
    gaps = [gap for gap in found if gap is not None]
    return len(gaps), max(gaps, default=0.0)


def _learn(actor: ActorWorker) -> float:
    """Sample, score and update by advantages of 1 and -1; the KL per token between generator and trainer."""
    asked = prompts()
    width = max(map(len, asked))
    ids, mask = torch.zeros(len(asked), width, dtype=torch.int64), torch.zeros(len(asked), width)
    for row, prompt in enumerate(asked):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1.0
    fields = {"prompt_ids": ids, "prompt_mask": mask, "valid": torch.ones(len(asked))}
    batch = Batch(step=1, start=0, size=len(asked), fields=fields)
    batch = batch.with_fields(actor.generate_sequences(batch))
    batch = batch.with_fields(actor.compute_log_prob(batch))
    signs = torch.ones(len(asked), 1)
    signs[::2] = -1.0
    batch = batch.with_fields({"ref_log_probs": batch["old_log_probs"], "advantages": signs * batch["response_mask"]})
    actor.update_actor(batch)
    return merge([recorder.drain()])["kl/rollout"]


if __name__ == "__main__":
    main(measure)
