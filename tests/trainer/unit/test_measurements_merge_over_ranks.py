"""Telemetry: what ranks measure becomes one record, whose times add up to the step."""

import pytest

from rlhf_trainer.telemetry import (
    CONTROLLER,
    ENDPOINTS,
    TRANSFER,
    Recorder,
    Span,
    covered,
    effective_share,
    explained_variance,
    idle_shares,
    merge,
    phase_seconds,
    slot_seconds,
    utilization,
)


def test_means_are_weighted_over_ranks() -> None:
    one, two = Recorder(), Recorder()
    one.mean("loss/sft", 6.0, 3)
    two.mean("loss/sft", 1.0, 1)
    two.maximum("grad_norm/sft", 2.0)
    one.add("tokens", 5)
    two.add("tokens", 7)
    assert merge([one.drain(), two.drain()]) == {"loss/sft": 7.0 / 4, "grad_norm/sft": 2.0, "tokens": 12.0}


def test_a_mean_of_nothing_is_not_reported() -> None:
    recorder = Recorder()
    recorder.mean("reward/mean", 0.0, 0.0)
    assert merge([recorder.drain()]) == {}


def test_a_deviation_is_that_of_the_numbers_of_all_ranks() -> None:
    one, two = Recorder(), Recorder()
    one.deviation("reward_part_std/a", 1.0 + 3.0, 1.0 + 9.0, 2.0)
    two.deviation("reward_part_std/a", 5.0, 25.0, 1.0)
    two.deviation("reward_part_std/b", 0.0, 0.0, 0.0)
    assert merge([one.drain(), two.drain()]) == {"reward_part_std/a": pytest.approx((8 / 3) ** 0.5)}


def test_draining_forgets() -> None:
    recorder = Recorder()
    recorder.add("tokens", 5)
    recorder.drain()
    assert recorder.drain().sums == {}


def test_overlapping_spans_count_once() -> None:
    spans = [Span("a", "", 0, 1.0, 3.0), Span("a", "", 1, 2.0, 4.0), Span("a", "", 0, 10.0, 11.0)]
    assert covered(spans) == pytest.approx(4.0)


def test_controller_and_transfer_get_the_idle_time() -> None:
    spans = [
        Span("generation", "", 0, 0.0, 2.0),
        Span(TRANSFER, "", 1, 1.5, 3.0),  # half a second of it under generation
        Span("update", "", 0, 4.0, 5.0),
        Span(CONTROLLER, "step 1", 0, 0.0, 6.0),  # its own spans do not count
    ]
    seconds = phase_seconds(spans, 6.0)
    assert seconds == pytest.approx(
        {"time/step": 6.0, "time/generation": 2.0, "time/update": 1.0, "time/transfer": 1.0, "time/controller": 2.0}
    )


def test_the_slots_of_a_pool_are_busy_or_idle() -> None:
    spans = [
        Span(CONTROLLER, "step 1", 0, 0.0, 10.0),
        Span("generation", "g", 0, 0.0, 4.0, "left"),
        Span(TRANSFER, "weights: wait", 0, 1.0, 2.0, "left"),
        Span("update", "u", 0, 3.0, 6.0, "left"),
        Span(TRANSFER, "u: fetch", 1, 0.0, 8.0, "left"),
        Span("update", "u", 1, 8.0, 10.0, "left"),
        Span("scoring", "s", 0, 1.0, 2.0, "right"),
    ]
    assert slot_seconds(spans, 10.0) == {"busy/left": 7.0, "idle/left": 13.0, "busy/right": 1.0, "idle/right": 9.0}


def test_a_utilization_is_of_all_slots_and_needs_a_known_peak() -> None:
    spans = [Span("update", "u", rank, 0.0, 1.0, "all") for rank in range(4)]
    record = {"flops/update": 3e12, "flops/scoring": 1e12, "peak_flops": 1e12}
    assert utilization(record, spans, 2.0) == {"mfu": 0.5}
    asks = Span("generation", "g", 0, 0.0, 1.0, ENDPOINTS)
    assert utilization(record, [*spans, asks], 2.0) == {"mfu": 0.5}, "it takes no slot"
    assert utilization({**record, "peak_flops": 0.0}, spans, 2.0) == {}


def test_a_phase_says_how_much_memory_was_in_use_at_its_end() -> None:
    recorder = Recorder()
    with recorder.span("update"), recorder.span(TRANSFER):
        pass
    maxima = recorder.drain().maxima
    assert set(maxima) == {"memory_bytes/update", "memory_used"}
    assert maxima["memory_bytes/update"] > 0
    assert 0 < maxima["memory_used"] < 1


def test_idle_shares_are_of_the_generating_and_actor_pools() -> None:
    record = {"busy/a": 9.0, "idle/a": 1.0, "busy/b": 6.0, "idle/b": 2.0, "busy/c": 1.0, "idle/c": 3.0}
    trains = [Span("update", "critic.update_critic", 0, 0, 1, "a"), Span("update", "actor.update_actor", 0, 0, 1, "b")]
    generates = [
        Span(TRANSFER, "rollout.receive_weights: wait", 0, 0, 1, "c"),
        Span("generation", "rollout.generate_sequences", 0, 0, 1, "c"),
    ]
    assert idle_shares(record, [*trains, *generates]) == {"rollout_idle": 0.75, "trainer_idle": 0.25}
    assert idle_shares(record, trains) == {}, "not of a job without a rollout pool"


def test_the_effective_share_is_that_of_equal_weights() -> None:
    half = {"correction/weight": 0.5, "correction/squared_weight": 0.5}  # half of the weights are 1, the others 0
    assert effective_share(half) == {"correction/effective_size": 0.5}
    assert (
        effective_share({"correction/weight": 3.0, "correction/squared_weight": 9.0})["correction/effective_size"]
        == 1.0
    )
    assert effective_share({"correction/weight": 0.0, "correction/squared_weight": 0.0}) == effective_share({}) == {}


def test_the_explained_variance_stands_in_place_of_its_moments() -> None:
    """Returns 1, 3 (variance 1); values 1, 2, whose errors 0, 1 have the variance 1 / 4."""
    record = {"returns/value": 2.0, "returns_square/value": 5.0, "errors/value": 0.5, "errors_square/value": 0.5}
    explained_variance(record)
    assert record == {"explained_variance/value": 0.75}
    constant = {"returns/value": 2.0, "returns_square/value": 4.0, "errors/value": 0.0, "errors_square/value": 0.0}
    explained_variance(constant)
    assert constant == {}


def test_a_warning_is_short_and_can_be_encoded() -> None:
    recorder = Recorder()
    recorder.warn("name", "\ud800" + "a" * 3000)
    assert recorder.drain().warnings == {"name": "\\ud800" + "a" * 1999}
