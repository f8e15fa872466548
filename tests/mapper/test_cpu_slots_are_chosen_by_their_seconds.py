"""The number of CPU slots that a job leaves open follows from the cores, the models and the length of the run."""

import pytest

from rlhf_api.job import Job
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.cpu_slots import COSTS, amounts_of, choose_slots
from tests.mapper.planned_jobs import job_of, shapes_of

SMALL = Architecture(layers=4, hidden=128, heads=4, kv_heads=2, head_size=32, ffn=320, vocabulary=512)
LARGE = Architecture(layers=8, hidden=512, heads=8, kv_heads=4, head_size=64, ffn=1664, vocabulary=512)
ROOM = 16e9


def grpo(steps: int = 100, *, prompts: int = 16, **training: int) -> Job:
    lengths = {"maxPromptTokens": 32, "maxResponseTokens": 64}
    rollout = {"samplesPerPrompt": 4, "minResponseTokens": 64}
    length = {"totalSteps": None, **training} if training else {"totalSteps": steps}
    return job_of("GRPO", data=lengths, rollout=rollout, training={"promptBatchSize": prompts, **length})


def chosen(*jobs: Job, model: Architecture = SMALL, cores: int = 2, memory: float = ROOM) -> int:
    return choose_slots([(job, shapes_of(job, model)) for job in jobs], cores, memory)[0]


def test_a_small_model_gets_a_slot_a_core() -> None:
    slots, seconds = choose_slots([(grpo(), shapes_of(grpo(), SMALL))], 2, ROOM)
    assert (slots, [*seconds]) == (2, [1, 2])
    _, of_one = choose_slots([(grpo(1), shapes_of(grpo(), SMALL))], 2, ROOM)
    assert seconds[2] - COSTS["start_seconds"] == pytest.approx(100 * (of_one[2] - COSTS["start_seconds"]))


def test_a_large_model_keeps_one_slot_with_all_threads() -> None:
    assert chosen(grpo(), model=LARGE) == 1


def test_a_few_steps_do_not_pay_for_another_process() -> None:
    assert [chosen(grpo(steps)) for steps in (2, 100)] == [1, 2]
    assert chosen(grpo(totalEpochs=3)) == 1, "the number of steps is not known"


def test_slots_divide_the_batch_and_the_cores() -> None:
    assert chosen(grpo(prompts=15), cores=8) in (1, 2, 4), "60 responses do not divide by 8"
    assert chosen(grpo(prompts=16), cores=3) == 1, "64 responses do not divide by 3"


def test_each_slot_needs_memory_for_its_process() -> None:
    assert chosen(grpo(), memory=2 * COSTS["process_bytes"]) == 1


def test_jobs_of_a_chain_get_one_number() -> None:
    assert chosen(grpo(2), grpo(100)) == 2, "the long one decides"
    assert chosen(grpo(), grpo(prompts=15), cores=8) in (1, 2, 4)


def test_slots_share_work_but_not_the_weights() -> None:
    job = grpo()
    one, two = (amounts_of(job, shapes_of(job, SMALL), slots, 2) for slots in (1, 2))
    assert one["products"] == two["products"], "all cores work on them in either case"
    assert one["sampled_tokens"] == 2 * two["sampled_tokens"]
    assert two["decode_reads"] == 2 * one["decode_reads"], "each slot reads all weights"
    assert one["exchanges"] == 0 < two["exchanges"]
