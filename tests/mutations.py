"""Changes of one line that a fast test must notice: `python -m tests.mutations [WORD ...]`, part of `make test-full`.

Each is made by itself in a copy of the repository, and its test is run there. WORD: only changes of files with it in
their path. Exit code 1: a change that no test noticed, or one that is no longer possible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("crds", "operator", "trainer_image", "examples", "tests", "docs", "helm", "pyproject.toml", "README.md")
SOURCES = ("crds", "operator", "trainer_image", "examples", ".")
"""Where packages are found, in the copy."""
NOTICED = 1
"""pytest's exit code where tests ran and one failed; others say that it could not run them."""
EVIDENCE = "tests/operator/test_the_strongest_evidence_wins.py"
MAPPER, OPERATOR = "operator/rlhf_mapper", "operator/rlhf_operator"
TRAINER, API = "trainer_image/rlhf_trainer", "crds/rlhf_api"
IMPORTERS, CHART = "trainer_image/rlhf_importers", "helm/rlhf-operator"
OPS = "tests/trainer/ops"
ADVANTAGES = f"{OPS}/test_advantages_follow_their_definition.py"
GROUPS = f"{OPS}/test_a_response_is_compared_with_its_group.py"
KTO = "tests/trainer/training/test_kto_follows_its_paper.py"
LOSSES = f"{OPS}/test_losses_are_shares_of_a_global_mean.py"
CORRECTIONS = f"{OPS}/test_rollouts_are_corrected_as_their_papers_say.py"
KL = f"{OPS}/test_the_kl_estimators_estimate_the_divergence.py"
RATES = "tests/trainer/training/test_optimizer_steps_use_the_rate_of_their_schedule.py"
RESHARD = "tests/trainer/hybrid_engine/test_a_plan_moves_what_is_lacking_and_no_more.py"
PROTOCOLS = "tests/trainer/unit/test_transfer_protocols_follow_their_types.py"
FAILURES = "tests/operator/test_a_failure_is_classified.py"
MAPPED = "tests/trainer/unit/test_a_worker_is_set_up_as_the_mapper_says.py"
FOLDER = "tests/trainer/unit/test_what_is_left_to_do_in_a_run_folder.py"
CHECKPOINTS = "tests/trainer/checkpoint/test_only_a_whole_checkpoint_is_chosen.py"
ATTEMPTS = "tests/trainer/pods/test_an_older_attempt_writes_no_more.py"
EXPERIMENT = "tests/api/test_only_the_same_experiment_goes_on.py"
CEL = "tests/api/test_cel_says_what_python_says.py"
REQUESTS = "tests/operator/test_writes_to_a_failing_server.py"
SHRINKING = "tests/operator/test_a_job_shrinks_for_a_higher_priority.py"
BACKFILL = "tests/operator/test_small_jobs_begin_before_their_turn.py"
SHARES = "tests/operator/test_namespaces_share_the_line.py"
ELECTION = "tests/operator/test_leader_election.py"
TRAINING = "tests/trainer/training"
EXPERTS = f"{TRAINING}/test_experts_over_ranks_learn_what_one_rank_does.py"
TABLE = f"{TRAINING}/test_layouts_learn_what_one_rank_does.py::test_a_layout_learns_what_one_rank_does"
REPLICAS = f"{TRAINING}/test_replicas_send_parts_of_their_steps.py"
REPLAYED = f"{TRAINING}/test_routing_is_replayed.py"
HEAD = f"{TRAINING}/test_log_probs_are_those_of_the_heads_logits.py"
PACKING = f"{TRAINING}/test_packed_texts_are_read_as_if_alone.py"
NEIGHBOURS = f"{TRAINING}/test_a_row_does_not_depend_on_its_neighbours.py"
LAYOUTS = f"{TRAINING}/test_losses_do_not_depend_on_ranks_micro_batches_or_padding.py"
SHARED_ROWS = f"{LAYOUTS}::test_an_update_is_the_same_if_ranks_share_rows"
BUNDLES = "tests/trainer/unit/test_rows_that_begin_alike_are_computed_together.py"
TREES = "tests/trainer/unit/test_a_row_may_be_a_tree.py"
COSTS = f"{TRAINING}/test_each_rank_computes_as_much.py::test_the_cost_of_a_row_is_half_of_a_layers_flops_by_hand"
REDUCTIONS = f"{TRAINING}/test_an_update_is_one_step_and_one_reduction.py"
ADAMW = f"{RATES}::test_moments_epsilon_and_decay_are_those_of_the_settings"
SAFE = (
    f"{TRAINING}/test_advantages_do_not_depend_on_ranks_or_padding.py"
    "::test_safe_rlhf_weighs_the_cost_by_the_multiplier_by_hand"
)
LOADING = f"{TRAINING}/test_a_rank_reads_and_holds_its_shards_only.py"
SLICES = (
    "tests/trainer/checkpoint/test_a_rank_downloads_what_it_holds.py::test_rows_and_columns_come_as_they_were_written"
)
BUCKETS = "tests/trainer/hybrid_engine/test_shards_travel_and_arrive_as_they_were.py"
WAITS = "tests/operator/test_waits_end_when_they_should.py"
DEFAULTS = "tests/trainer/unit/importers/test_defaults_of_another_project.py"
COLLECTIVES = "tests/trainer/unit/test_collectives_outlast_calls.py"
EDGES = "tests/trainer/unit/test_edges_of_measures.py"
NUMBERS = "tests/helm/test_numbers_of_the_chart.py"
COEFFICIENTS = "tests/mapper/test_coefficients_are_as_fitted.py"


@dataclass(frozen=True)
class Mutation:
    """A change of a file that is wrong."""

    file: str
    old: str
    """Is in the file exactly once."""
    new: str
    test: str
    """What must fail, as pytest's argument."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip() or 'nothing'}"

    def mutated(self, root: Path) -> str:
        """The changed text of the file; ValueError if `old` is not there exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def ops(file: str, old: str, new: str, test: str) -> Mutation:
    """A change in rlhf_trainer.ops."""
    return Mutation(f"{TRAINER}/ops/{file}.py", old, new, test)


def training(file: str, old: str, new: str, test: str) -> Mutation:
    """A change in rlhf_trainer.training."""
    return Mutation(f"{TRAINER}/training/{file}.py", old, new, test)


MUTATIONS = (
    ops("advantages", "rewards + gamma * next_values", "rewards + next_values", ADVANTAGES),
    ops("advantages", "torch.where(here, gamma * lam,", "torch.where(here, gamma,", ADVANTAGES),
    ops("advantages", "keep(advantages + values, mask)", "keep(advantages - values, mask)", ADVANTAGES),
    ops("advantages", "return keep(-penalty, mask)", "return keep(penalty, mask)", ADVANTAGES),
    ops("advantages", "shaped.clamp(-clip, clip)", "shaped.clamp(0.0, clip)", ADVANTAGES),
    ops("advantages", ".flip(1).cumsum(1).flip(1), mask)", ".cumsum(1), mask)", GROUPS),
    ops("advantages", "buffer_tokens).clamp(0.0, 1.0)", "buffer_tokens).clamp(0.0, 2.0)", GROUPS),
    ops("advantages", "> SIGNAL", ">= 0.0", GROUPS),
    ops("losses", "moved.clamp(1.0 - low, 1.0 + high)", "moved.clamp(1.0 - high, 1.0 + low)", LOSSES),
    ops("losses", "torch.minimum(unclipped, clipped)", "torch.maximum(unclipped, clipped)", LOSSES),
    ops("losses", "return 0.5 * (masked_sum(error", "return (masked_sum(error", LOSSES),
    ops("losses", "error = torch.maximum(error", "error = torch.minimum(error", LOSSES),
    ops("losses", "keep(chosen - rejected, weight)", "keep(rejected - chosen, weight)", LOSSES),
    ops("losses", "torch.where(safe > 0, -costs, costs)", "torch.where(safe > 0, costs, -costs)", LOSSES),
    ops("rollout_correction", "plain.clamp(min=low, max=high)", "plain.clamp(min=low)", CORRECTIONS),
    ops("rollout_correction", "(plain < low) | (plain > high)", "plain > high", CORRECTIONS),
    ops("rollout_correction", "< (correction.veto or 0.0)", "> (correction.veto or 9.0)", CORRECTIONS),
    ops("kl", "return -log_ratio", "return log_ratio", KL),
    ops("kl", "return 0.5 * log_ratio.square()", "return log_ratio.square()", KL),
    ops("kl", "torch.expm1(log_ratio) - log_ratio", "torch.expm1(-log_ratio) + log_ratio", KL),
    ops("kl", "MAX_RELATIVE_ERROR = 0.2", "MAX_RELATIVE_ERROR = 0.3", KL),
    ops(
        "running",
        "self.count * batch_count / count",
        "batch_count / count",
        f"{OPS}/test_running_moments_do_not_depend_on_the_batches.py",
    ),
    ops(
        "aggregation",
        'if aggregation == "SequenceMean"',
        'if aggregation == "TokenMean"',
        f"{OPS}/test_tokens_and_responses_weigh_as_the_aggregation_says.py",
    ),
    Mutation(f"{TRAINER}/algorithms/grpo.py", "    if normalize_by_std:", "    if not normalize_by_std:", GROUPS),
    Mutation(f"{TRAINER}/algorithms/kto.py", "(2.0 * desirable - 1.0)", "(1.0 - 2.0 * desirable)", KTO),
    Mutation(f"{TRAINER}/algorithms/kto.py", "self.undesirable_weight * (", "self.desirable_weight * (", KTO),
    Mutation(f"{TRAINER}/workers/preference.py", "max(total / rows, 0.0)", "total / rows", KTO),
    Mutation(
        f"{TRAINER}/data/loaders.py",
        "rows.batch.roll(-shift)",
        "rows.batch",
        "tests/trainer/unit/data/test_a_batch_holds_what_the_model_sees.py",
    ),
    Mutation(f"{TRAINER}/algorithms/rloo.py", "(count - 1).clamp", "count.clamp", GROUPS),
    Mutation(
        f"{API}/spec/algorithms.py", "return (gain - multiplier * cost)", "return (gain + multiplier * cost)", SAFE
    ),
    Mutation(f"{API}/spec/algorithms.py", "multiplier * cost) / (1.0 + multiplier)", "multiplier * cost)", SAFE),
    training("experts", "back[place].view", "back[order].view", EXPERTS),
    training("experts", "repeat_interleave(arriving.flatten()", "repeat_interleave(arriving.T.flatten()", EXPERTS),
    training("experts", "start = min(rank * size, count)", "start = 0", EXPERTS),
    training("experts", "set_gradient_divide_factor(reduced)", "set_gradient_divide_factor(1)", EXPERTS),
    training("compression", "add_decoded(sent, rows, factor=-1.0)", "rows.zero_()", REPLICAS),
    training("experts", "hidden[order // index.shape[1]]", "hidden[order % len(hidden)]", f"{TABLE}[1-2-2-1-1-SFT]"),
    training("experts", "arange(own.num_experts,", "arange(own.num_experts - 1, -1, -1,", f"{TABLE}[1-2-2-1-1-SFT]"),
    Mutation(f"{API}/spec/parallel_sizes.py", "shard, part = divmod(", "part, shard = divmod(", EXPERTS),
    training(
        "model_input",
        "[seen_starts[document] : seen_starts[document] + seen]",
        "[seen_starts[document + 1] - seen : seen_starts[document + 1]]",
        SHARED_ROWS,
    ),
    training("sharding", "for name in frozen:", "for name in ():", f"{TABLE}[1-2-2-1-1-LoRA]"),
    training(
        "routing", ", prepend=True)", ")", f"{REPLAYED}::test_the_load_of_experts_is_that_of_the_generators_choice"
    ),
    training(
        "routing",
        "pairs = sum_over_ranks(",
        "pairs = list(",
        f"{REPLAYED}::test_other_choices_of_routers_are_judged_over_all_ranks",
    ),
    training("rope", "[[tokens - 1]]", "[[tokens]]", NEIGHBOURS),
    training("rope", "if layer else FIXED", "if layer else types[layer]", NEIGHBOURS),
    training("optimizer", "min(1.0, step / settings", "min(1.0, (step - 1) / settings", RATES),
    training("optimizer", "COSINE_FLOOR = 0.1", "COSINE_FLOOR = 0.2", RATES),
    training("optimizer", "max(0, step - settings.warmup_steps)", "step", RATES),
    training("optimizer", "betas=settings.betas", "betas=(0.9, 0.999)", ADAMW),
    training("optimizer", "weight_decay=settings.weight_decay", "weight_decay=0.0", ADAMW),
    training("head", "weighted / total if options.entropy", "weighted if options.entropy", HEAD),
    training("head", "own - log_total, entropies", "own - total.log(), entropies", HEAD),
    training("model_input", "of_texts[first[is_read] - 1]", "of_texts[first[is_read]]", PACKING),
    training("model_input", "packed[earlier, :size]", "packed[each, :size]", PACKING),
    training("attention", "triu(prompt + 1 - window)", "triu(prompt - window)", PACKING),
    training(
        "attention",
        "device=device).tril(prompt)",
        "device=device).tril()",
        PACKING,
    ),
    training("model_input", "seen -= start + own - high  #", "seen -= start + own - high - 1  #", PACKING),
    training("model_input", "(each >= first) & (each < stop)", "(each > first) & (each < stop)", SHARED_ROWS),
    training("trainer", "self.mesh.layout.data * self.mesh.layout.context\n", "self.mesh.layout.data\n", SHARED_ROWS),
    training("sequence", "[Partial()]", "[Replicate()]", SHARED_ROWS),
    training("batching", "tokens += total - sum(found)", "tokens += total", BUNDLES),
    training("branches", "last = int(before[start])", "last = start - 1", TREES),
    training("branches", "(text.forks or", "(False or", TREES),
    training("batching", "* (self._parameters +", "* (0 *", COSTS),
    training("batching", "self._attention * lengths)", "self._attention)", COSTS),
    training(
        "optimizer",
        "set_requires_all_reduce(is_last)",
        "set_requires_all_reduce(True)",
        f"{REDUCTIONS}::test_gradients_are_reduced_after_the_last_micro_batch",
    ),
    training(
        "loading",
        "append(Piece(file, name, place))",
        "append(Piece(file, own, place))",
        f"{LOADING}::test_weights_saved_without_the_head_are_found_by_name",
    ),
    training(
        "loading",
        "if stored != own:",
        "if stored == ():",
        f"{LOADING}::test_a_damaged_folder_is_one_sentence",
    ),
    Mutation(f"{TRAINER}/stored_tensors.py", "start + index[0].start * row", "start", SLICES),
    Mutation(f"{TRAINER}/stored_tensors.py", "(slice(None), *index[1:])", "(slice(None), *index[2:])", SLICES),
    Mutation(f"{TRAINER}/stored_tensors.py", "part.within(held)[", "part.within(part)[", SLICES),
    Mutation(f"{TRAINER}/protocols.py", "+ min(index, longer)", "+ max(index, longer)", PROTOCOLS),
    Mutation(f"{TRAINER}/protocols.py", "AxisPlacement.LAST: size - 1", "AxisPlacement.LAST: 0", PROTOCOLS),
    Mutation(
        f"{TRAINER}/controller/slot_process.py",
        "                    worker.close()",
        "                    pass",
        "tests/trainer/unit/test_a_job_leaves_its_processes_to_the_next.py",
    ),
    Mutation(f"{TRAINER}/hybrid_engine/reshard_plan.py", "source % len(needing)", "0", RESHARD),
    Mutation(f"{TRAINER}/hybrid_engine/reshard_plan.py", "if nodes[rank] == node", "if nodes[rank] >= node", RESHARD),
    Mutation(f"{TRAINER}/hybrid_engine/reshard_plan.py", "holders[node % len(holders)]", "holders[0]", RESHARD),
    Mutation(f"{TRAINER}/hybrid_engine/reshard_plan.py", "inside[place % len(inside)]", "inside[0]", RESHARD),
    Mutation(
        f"{TRAINER}/hybrid_engine/buckets.py",
        "torch.maximum(across + within",
        "torch.minimum(across + within",
        f"{BUCKETS}::test_no_rank_sends_and_gets_more_in_a_step_than_the_limit",
    ),
    Mutation(
        f"{TRAINER}/hybrid_engine/buckets.py",
        "for _, cut in sorted(found)",
        "for _, cut in found",
        f"{BUCKETS}::test_stages_send_by_turns",
    ),
    Mutation(
        f"{TRAINER}/telemetry.py",
        "old_weight + _in_64_bits(weight)",
        "old_weight + 1.0",
        "tests/trainer/unit/test_measurements_merge_over_ranks.py",
    ),
    Mutation(f"{TRAINER}/checkpoint.py", "in reversed(self.all()) if", "in self.all() if", CHECKPOINTS),
    Mutation(f"{TRAINER}/checkpoint.py", "in whole[-keep_last:]", "in whole[:keep_last]", CHECKPOINTS),
    Mutation(f"{TRAINER}/run/worker_specs.py", "mapped.offload if model", "model.offload if model", MAPPED),
    Mutation(
        f"{TRAINER}/run/worker_specs.py",
        "training=tokens, ",
        "",
        MAPPED,
    ),
    Mutation(
        "operator/rlhf_planning/job_plan.py",
        "ENGINE_SHARE, MAX_SHARE = 0.05",
        "ENGINE_SHARE, MAX_SHARE = 0.15",
        MAPPED,
    ),
    Mutation(
        f"{API}/checks/parallel_rules.py",
        "divides = whole % Field",
        "divides = whole * Field",
        "tests/api/test_cases_are_judged_as_expected.py",
    ),
    Mutation(
        f"{API}/expressions.py",
        "not one or other",
        "not other or one",
        "tests/api/test_cases_are_judged_as_expected.py",
    ),
    Mutation(f"{API}/expressions.py", '"({} && {})"', '"({} || {})"', CEL),
    Mutation(f"{API}/expressions.py", '[*(f"!{given}" for given in needed), test', "[test", CEL),
    Mutation(f"{TRAINER}/run/resume.py", "if new_length or not folder", "if not folder", FOLDER),
    Mutation(f"{TRAINER}/run_folder/lock.py", "if mine and newer:", "if mine and newer and mine == newer:", ATTEMPTS),
    Mutation(f"{TRAINER}/run_folder/lock.py", "SETTLE_SECONDS: Final = 1.0", "SETTLE_SECONDS: Final = 0.1", ATTEMPTS),
    Mutation(f"{API}/checks/may_change.yaml", "spec: [checkpoint, outputs", "spec: [outputs", EXPERIMENT),
    Mutation(f"{API}/checks/resume.py", '["schedule"] != "Constant"', '["schedule"] == "Constant"', EXPERIMENT),
    Mutation(f"{API}/exit_codes.py", "COMMUNICATION = 8", "COMMUNICATION = 9", FAILURES),
    Mutation(f"{OPERATOR}/failures.yaml", "exit_codes: [6]", "exit_codes: [9]", FAILURES),
    Mutation(
        f"{OPERATOR}/failures.yaml",
        "NodeLost: {action: Ignore",
        "NodeLost: {action: Restart",
        FAILURES,
    ),
    Mutation(
        f"{OPERATOR}/evidence.py",
        '("Preempted", "NodeLost", "Evicted", "OutOfStorage", "OutOfMemory")',
        '("OutOfMemory", "OutOfStorage", "Evicted", "NodeLost", "Preempted")',
        EVIDENCE,
    ),
    Mutation(
        f"{OPERATOR}/conditions.py",
        '("Queued", "QuotaReserved", LACKS',
        '("Provisioning", "QuotaReserved", LACKS',
        "tests/operator/test_a_job_lives_its_life.py",
    ),
    Mutation(f"{OPERATOR}/cluster/client.py", "self.status >= 500", "self.status > 500", REQUESTS),
    Mutation(f"{OPERATOR}/cluster/client.py", 'del query["continue"], query["limit"]', "pass", REQUESTS),
    Mutation(f"{OPERATOR}/cluster/client.py", "                items.clear()\n", "", REQUESTS),
    Mutation(
        f"{OPERATOR}/cluster/leader_election.py",
        "self._renewed = begun",
        "self._renewed = self._clock()",
        f"{ELECTION}::test_the_deadline_counts_from_the_servers_renewal",
    ),
    Mutation(
        f"{OPERATOR}/cluster/leader_election.py",
        "self._seen_at < claimed",
        "self._seen_at < 0",
        f"{ELECTION}::test_a_killed_leader_is_followed_after_the_duration",
    ),
    Mutation(
        f"{OPERATOR}/work_queue.py",
        "LONGEST_PAUSE: Final = 120.0",
        "LONGEST_PAUSE: Final = 1200.0",
        "tests/operator/test_work_queue.py",
    ),
    Mutation(
        f"{MAPPER}/gpus.yaml",
        "[h100,              80,  989.4,",
        "[h100,              80, 1978.8,",
        "tests/mapper/test_a_product_name_is_a_row_of_the_gpu_table.py",
    ),
    Mutation(
        f"{MAPPER}/simulate/layer.py",
        "FUSED_KERNELS, FUSED_TOUCHES = 12, 14",
        "FUSED_KERNELS, FUSED_TOUCHES = 24, 14",
        "tests/mapper/test_simulators_by_hand.py",
    ),
    Mutation(
        f"{MAPPER}/simulate/layer.py",
        "ffn=(3 if is_fused else 4) * size,",
        "ffn=3 * size,",
        "tests/mapper/test_memory_by_hand.py",
    ),
    Mutation(
        f"{MAPPER}/simulate/generation.py",
        "count * share / here",
        "count",
        "tests/mapper/test_simulators_by_hand.py",
    ),
    Mutation(
        f"{TRAINER}/workers/actor.py",
        "self._first_step = 1 + (",
        "self._first_step = (",
        f"{TRAINING}/test_an_actors_update_is_the_papers_formula.py::test_the_actor_waits_for_its_critic",
    ),
    Mutation(f"{IMPORTERS}/keys/verl.txt", "lam=1.0 ", "lam=0.95 ", DEFAULTS),
    Mutation(f"{IMPORTERS}/keys/openrlhf.txt", "init_kl_coef=0.01", "init_kl_coef=0.1", DEFAULTS),
    Mutation(f"{IMPORTERS}/keys/trl.txt", "lora_alpha=32", "lora_alpha=16", DEFAULTS),
    Mutation(f"{TRAINER}/run/slots.py", "COLLECTIVE_DEADLINES = 2", "COLLECTIVE_DEADLINES = 1", COLLECTIVES),
    Mutation(f"{TRAINER}/run/evaluation.py", "wins = [0.5 if", "wins = [0.0 if", EDGES),
    Mutation(f"{TRAINER}/report/held_out.py", "[TIE if change == 0 else", "[0.0 if change == 0 else", EDGES),
    Mutation(f"{TRAINER}/report/held_out.py", "CONFIDENCE = 1.96", "CONFIDENCE = 0.196", EDGES),
    Mutation(
        f"{TRAINER}/rewards/judge.py",
        '"C": 0.5',
        '"C": 0.0',
        "tests/trainer/rewards/test_a_judge_is_asked_fairly_and_never_trusted.py",
    ),
    Mutation(f"{OPERATOR}/reconcile/giving.py", "(end == math.inf or end > start) and ", "", BACKFILL),
    Mutation(f"{OPERATOR}/reconcile/giving.py", "priority < demand.priority", "priority <= demand.priority", SHRINKING),
    Mutation(f"{OPERATOR}/placement/turns.py", "share, job.created", "job.created", SHARES),
    Mutation(f"{OPERATOR}/reconciler.py", "RESYNC_SECONDS: Final = 300.0", "RESYNC_SECONDS: Final = 300_000.0", WAITS),
    Mutation(
        f"{OPERATOR}/reconciler.py", "RELIST_DELAY_SECONDS: Final = 10.0", "RELIST_DELAY_SECONDS: Final = 99.0", WAITS
    ),
    Mutation(f"{OPERATOR}/reconcile/running.py", "CLOCK_SECONDS: Final = 2.0", "CLOCK_SECONDS: Final = 200.0", WAITS),
    Mutation(
        f"{OPERATOR}/failure.py",
        '    "Unknown": (disrupted_lost_pod, lost_worker),\n',
        "",
        WAITS,
    ),
    Mutation(f"{OPERATOR}/failure.py", "AVOIDED_SECONDS: Final = 3600.0", "AVOIDED_SECONDS: Final = 360.0", WAITS),
    Mutation(f"{OPERATOR}/evidence.py", "NODE_SECONDS: Final = 60.0", "NODE_SECONDS: Final = 6.0", WAITS),
    Mutation(
        f"{OPERATOR}/reconcile/cleanup.py",
        "GIVE_UP_SECONDS: Final = 120.0",
        "GIVE_UP_SECONDS: Final = 150.0",
        "tests/operator/test_an_attempt_follows_a_failure.py",
    ),
    Mutation(f"{OPERATOR}/failure.py", "EVIDENCE_SECONDS: Final = 60.0", "EVIDENCE_SECONDS: Final = 6.0", WAITS),
    Mutation(
        f"{OPERATOR}/failure.py", "LAST_STATUS_SECONDS: Final = 30.0", "LAST_STATUS_SECONDS: Final = 300.0", WAITS
    ),
    Mutation(
        f"{OPERATOR}/reconcile/attempt_status.py",
        "SILENCE_SECONDS: Final = 60.0",
        "SILENCE_SECONDS: Final = 600.0",
        FAILURES,
    ),
    Mutation(f"{OPERATOR}/placement/map_job.py", "MIN_SLOWDOWN = 1.15", "MIN_SLOWDOWN = 1.01", WAITS),
    Mutation(
        f"{OPERATOR}/placement/claim_size.py",
        "HEADROOM: Final = 1.1",
        "HEADROOM: Final = 0.9",
        "tests/operator/test_a_claim_holds_the_checkpoints.py",
    ),
    Mutation(
        f"{OPERATOR}/failures.yaml",
        "ImagePull: {action: Restart, start_seconds: 300}",
        "ImagePull: {action: Restart, start_seconds: 3000}",
        "tests/operator/test_what_keeps_pods_from_coming_is_told.py",
    ),
    Mutation(
        "operator/rlhf_kubectl/why.py",
        '"Slow": "True"',
        '"Slow": "False"',
        "tests/kubectl/test_why_a_job_waits.py",
    ),
    Mutation(f"{CHART}/templates/deployment.yaml", "failureThreshold: 30", "failureThreshold: 1", NUMBERS),
    Mutation(f"{CHART}/templates/prometheusrule.yaml", "- 3 * stddev", "- 0 * stddev", NUMBERS),
    Mutation(f"{CHART}/values.yaml", "memoryRatio: 0.95", "memoryRatio: 0.59", NUMBERS),
    Mutation(f"{MAPPER}/software.yaml", "    network: 0.85", "    network: 0.95", COEFFICIENTS),
    Mutation(f"{MAPPER}/software.yaml", "running_sequences: 256", "running_sequences: 512", COEFFICIENTS),
)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rlhf-mutations-") as folder:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        yield Path(folder)


def run(root: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy, on the packages of that copy, until the first fails."""
    path = os.pathsep.join(str(root / source) for source in SOURCES)
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*command, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False)


def unnoticed(root: Path, mutation: Mutation) -> str:
    """Make a change in a copy, run its test and take it back: what is wrong with the test; empty if it failed."""
    file = root / mutation.file
    before = file.read_text()
    file.write_text(mutation.mutated(root))
    try:
        done = run(root, [mutation.test])
    finally:
        file.write_text(before)
    return "" if done.returncode == NOTICED else f"{mutation}\n{mutation.test} ends with {done.returncode}"


def main() -> int:
    """Run all that are asked for."""
    asked = [each for each in MUTATIONS if all(word in each.file for word in sys.argv[1:])]
    with copied() as root:
        whole = run(root, sorted({each.test for each in asked}))
        if whole.returncode:
            print(f"the tests fail without a change\n{whole.stdout}", file=sys.stderr)
            return 1
        found = []
        for mutation in asked:
            wrong = unnoticed(root, mutation)
            print(f"{'not noticed' if wrong else 'noticed':<12} {mutation}", flush=True)
            found += [wrong] if wrong else []
    print("\n".join(["", *found, f"{len(asked) - len(found)} of {len(asked)} changes are noticed"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
