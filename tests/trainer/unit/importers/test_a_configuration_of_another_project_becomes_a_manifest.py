"""`rlhf import`: realistic configurations become valid manifests, and each of their keys is told of."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_api.exit_codes import ExitCode
from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_importers.command import PROJECTS, convert
from rlhf_importers.shell import flags
from rlhf_importers.table import Draft
from rlhf_importers.verl import read as read_hydra
from rlhf_trainer.commands.cli import app
from tests.each import each_case

VERL = """
set -x
DATA=/data/gsm8k
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$DATA/train.parquet \\
    data.val_files="['/data/gsm8k/test.parquet','/data/math/test.parquet']" \\
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 `# a peak` \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.name=vllm \\
    +actor_rollout_ref.rollout.made_up=7 \\
    custom_reward_function.path=rewards/mine.py custom_reward_function.name=score \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=-1 \\
    trainer.logger='["console","wandb"]' trainer.project_name=sums \\
    trainer.experiment_name='Qwen2.5_7B GRPO' made.up=1 $@
"""
VERL_YAML = """
defaults: [ppo_trainer, _self_]
algorithm: {adv_estimator: gae, lam: 0.95, use_kl_in_reward: true}
algorithm.kl_ctrl: {type: adaptive, kl_coef: 0.02, target_kl: 6}
data: {train_files: [/d/a.parquet, /d/b.parquet], max_prompt_length: 100, train_batch_size: 64, truncation: left}
actor_rollout_ref:
  model: {path: org/sft, lora_rank: 32}
  actor: {ppo_mini_batch_size: 32, optim: {lr: 2e-6, lr_warmup_steps_ratio: 0.1}, clip_ratio_c: 3.0}
  rollout: {n: "${made.by}", prompt_length: "${data.max_prompt_length}"}
made: {by: 2}
critic: {model: {path: org/sft}, cliprange_value: 0.5, optim: {lr: 1e-5}}
reward_model: {enable: true, model: {path: org/rm}}
trainer: {total_training_steps: 200}
"""
OPENRLHF = """
ACTOR_ARGS=(
   --actor.model_name_or_path meta-llama/Llama-3.1-8B-Instruct   # instruct
   --actor.adam.lr 5e-7
   --actor.adam.betas 0.9 0.95
   --actor.num_nodes 2
   --actor.num_gpus_per_node 8
)
ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${ACTOR_ARGS[@]} \\
   --reward.model_name_or_path org/rm --critic.adam.lr 9e-6 \\
   --rollout.batch_size 256 --rollout.n_samples_per_prompt 4 --train.batch_size 128 \\
   --data.prompt_dataset org/prompts --data.input_key messages --data.apply_chat_template \\
   --data.max_len 3072 --rollout.max_new_tokens 2048 \\
   --algo.kl.init_coef 0.01 --reward.normalize_enable --actor.eps_clip_low_high 0.2 0.3 \\
   --logger.wandb.project sums --ds.zero_stage 3 --vllm.num_engines 8 --ckpt.save_steps -1 --made.up 3
"""
OPENRLHF_OLD = """
deepspeed --module openrlhf.cli.train_dpo --pretrain org/sft --dataset org/pairs --beta 0.05 --learning_rate 5e-7 \\
   --max_len 2048 --train_batch_size 64 --lr_warmup_ratio 0.1 --zero_stage 3 --bf16
"""
OPENRLHF_SFT = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft --data.dataset data/train.jsonl --data.input_key question --data.output_key answer \\
   --train.batch_size 64 --model.model_name_or_path ./base --adam.lr 5e-6 --ds.lora.rank 16
EOF
deepspeed --module $training_commands
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward, my.rewards.brief]
reward_weights: [1.0, 0.5, 0.1]
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 400
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
beta: 0.001
epsilon_high: 0.28
scale_rewards: none
loss_type: dr_grpo
use_vllm: true
use_peft: true
lora_r: 8
bf16: true
eval_strategy: steps
report_to: [tensorboard]
eval_steps: 50
made_up: 1
"""
TRL_SCRIPT = """
trl dpo --model_name_or_path org/sft --dataset_name org/pairs --beta 0.2 --loss_type ipo --max_length 1024 \\
  --per_device_train_batch_size 4 --lr_scheduler_type constant --report_to none
"""
CONFIGURATIONS = {
    "verl script": ("verl", VERL),
    "verl YAML": ("verl", VERL_YAML),
    "OpenRLHF PPO": ("openrlhf", OPENRLHF),
    "OpenRLHF DPO of 0.9": ("openrlhf", OPENRLHF_OLD),
    "OpenRLHF SFT": ("openrlhf", OPENRLHF_SFT),
    "TRL GRPO": ("trl", TRL),
    "TRL DPO": ("trl", TRL_SCRIPT),
}


def draft_of(name: str) -> Draft:
    project, text = CONFIGURATIONS[name]
    return convert(text, project, source="FILE")


def fields(draft: Draft, *paths: str) -> dict[str, Any]:
    return {path: draft.get(path) for path in paths}


@each_case("name", CONFIGURATIONS)
def test_the_manifest_is_valid(name: str) -> None:
    Job.parse(draft_of(name).document())


@each_case("name", CONFIGURATIONS)
def test_each_key_is_in_exactly_one_list(name: str) -> None:
    project, text = CONFIGURATIONS[name]
    draft = draft_of(name)
    told = [*draft.mapped, *draft.not_needed, *draft.lost, *draft.unknown]
    keys, _ = PROJECTS[project].read(text, "FILE")
    assert sorted(told) == sorted(keys)


def test_a_verl_script_keeps_its_mathematics() -> None:
    draft = draft_of("verl script")
    assert draft.name == "qwen2-5-7b-grpo"
    assert draft.spec["algorithm"] == {
        "name": "GRPO",
        "aggregation": "SequenceMean",
        "kl": {"coefficient": 0.001, "applyTo": "Loss", "estimator": "K3"},
    }
    assert draft.spec["training"] == {"promptBatchSize": 256, "miniBatchSize": 320, "totalEpochs": 30}
    assert draft.spec["rollout"] == {"samplesPerPrompt": 5}
    assert fields(draft, "models.actor.optimizer.learningRate", "models.actor.optimizer.betas") == {
        "models.actor.optimizer.learningRate": 1e-6,
        "models.actor.optimizer.betas": [0.9, 0.999],
    }
    assert draft.get("models.actor.offload") == "Parameters"
    assert draft.get("models.reward.entrypoint") == "mine:score"
    assert draft.get("data.train.uri") == "file:///data/gsm8k/train.parquet"
    assert [each["name"] for each in draft.get("evaluation.data.sets")] == ["gsm8k_test", "math_test"]
    assert draft.spec["resources"] == {"nodes": 2, "slotsPerNode": 8}
    assert draft.spec["outputs"] == {"wandb": {"project": "sums"}}
    assert draft.unknown == ["made.up"]
    assert "actor_rollout_ref.rollout.made_up" in draft.not_needed


def test_a_verl_file_says_what_is_lost() -> None:
    draft = draft_of("verl YAML")
    assert draft.get("algorithm.kl") == {
        "coefficient": 0.02,
        "applyTo": "Reward",
        "controller": "Coefficient",
        "target": 6,
        "horizon": 10000,
        "estimator": "K1",
    }
    assert draft.get("training.totalSteps") == 200
    assert draft.get("training.totalEpochs") is None
    assert draft.get("training.miniBatchSize") == 64, "verl counts prompts, and n is 2"
    assert draft.get("models.actor.optimizer.warmupSteps") == 20
    assert draft.get("models.reward.uri") == "hf://org/rm"
    assert "actor_rollout_ref.actor.clip_ratio_c" in draft.lost
    assert draft.get("models.actor.lora") == {"rank": 32, "alpha": 16, "targets": []}
    assert any("never cut" in check for check in draft.checks)


def test_an_interpolation_of_hydra_is_the_value_that_it_names() -> None:
    values, _ = read_hydra("a: {b: 3}\nc: '${a.b}'\nd: '${oc.select:a.x,5}'\ne: '${.b}'\nf: '???'", "FILE")
    assert values == {"a.b": 3, "c": 3, "d": 5, "e": None, "f": None}


def test_an_openrlhf_script_keeps_its_mathematics() -> None:
    draft = draft_of("OpenRLHF PPO")
    assert draft.spec["algorithm"] == {
        "name": "PPO",
        "discount": 1.0,
        "gaeLambda": 1.0,
        "clipRange": 0.2,
        "clipRangeHigh": 0.3,
        "valueClipRange": 0.5,
        "aggregation": "TokenMean",
        "kl": {"coefficient": 0.01, "applyTo": "Reward", "estimator": "K1"},
        "rewards": {"normalization": "Running", "clip": 10},
    }
    assert draft.get("models.critic.uri") == "hf://org/rm", "OpenRLHF starts the critic from the reward model"
    assert draft.spec["outputs"] == {"wandb": {"project": "sums"}}
    expected = {"promptBatchSize": 256, "miniBatchSize": 128, "updateEpochs": 1, "totalEpochs": 1, "seed": 42}
    assert draft.spec["training"] == expected
    assert fields(draft, "data.maxPromptTokens", "data.maxResponseTokens") == {
        "data.maxPromptTokens": 1024,
        "data.maxResponseTokens": 2048,
    }
    assert draft.unknown == ["made.up"]


def test_an_adapter_of_openrlhf_is_one_of_all_linear_layers() -> None:
    assert draft_of("OpenRLHF SFT").get("models.actor.lora") == {"rank": 16, "alpha": 16, "targets": []}


def test_flags_of_older_openrlhf_are_known() -> None:
    draft = draft_of("OpenRLHF DPO of 0.9")
    assert draft.spec["algorithm"] == {"name": "DPO", "beta": 0.05}
    assert draft.get("models.actor.optimizer.learningRate") == 5e-7
    assert draft.unknown == ["bf16"]


def test_a_trl_file_keeps_its_mathematics() -> None:
    draft = draft_of("TRL GRPO")
    assert fields(draft, "algorithm.aggregation", "algorithm.normalizeByStd", "algorithm.clipRangeHigh") == {
        "algorithm.aggregation": "FixedLength",
        "algorithm.normalizeByStd": False,
        "algorithm.clipRangeHigh": 0.28,
    }
    assert draft.get("training.promptBatchSize") == 8, "16 responses, 4 at a time, of 8 to a prompt"
    assert draft.get("training.miniBatchSize") == 64
    assert draft.get("models.actor.optimizer.warmupSteps") == 40
    assert draft.get("models.actor.lora") == {"rank": 8, "alpha": 32, "targets": ["q_proj", "v_proj"]}
    assert [part["weight"] for part in draft.get("models.reward.sum")] == [1.0, 0.5, 0.1]
    assert draft.get("models.reward.sum")[2]["reward"] == {"entrypoint": "my.rewards:brief"}
    assert draft.spec["outputs"] == {"tensorboard": True}
    assert draft.unknown == ["made_up"]


def test_losses_of_pairs_keep_their_mathematics() -> None:
    assert draft_of("TRL DPO").spec["algorithm"] == {
        "name": "DPO",
        "beta": 0.2,
        "loss": "IPO",
        "lengthNormalized": True,
    }
    text = "trl dpo --model_name_or_path a/b --dataset_name a/c --label_smoothing 0.1 --loss_type"
    robust, plain, hinge = (convert(f"{text} {each}", "trl", source="FILE") for each in ("robust", "sigmoid", "hinge"))
    assert robust.spec["algorithm"] == {"name": "DPO", "loss": "Robust", "labelSmoothing": 0.1}
    assert plain.spec["algorithm"] == {"name": "DPO"}, "TRL's sigmoid does not read it"
    assert any("no loss hinge" in check for check in hinge.checks)
    text = "python -m openrlhf.cli.train_dpo --model.ipo_enable --model.label_smoothing 0.1"
    options = {"name": "DPO", "loss": "IPO", "labelSmoothing": 0.1}
    assert convert(text, "openrlhf", source="FILE").spec["algorithm"].items() >= options.items()


TRL_CALL = "trl grpo --model_name_or_path a/b --dataset_name a/c --reward_funcs accuracy_reward --use_vllm true"
OPENRLHF_CALL = "python -m openrlhf.cli.train_ppo_ray --algo.advantage.is_correction_enable"
CORRECTIONS: list[tuple[str, str, dict[str, Any], str]] = [
    ("trl", TRL_CALL, {"level": "Sequence", "mode": "Mask", "low": 1e-9, "high": 3.0}, ""),
    (
        "trl",
        f"{TRL_CALL} --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_min 0.5",
        {"level": "Token", "mode": "Clip", "low": 0.5, "high": 3.0},
        "",
    ),
    ("openrlhf", OPENRLHF_CALL, {"level": "Token", "mode": "Clip", "low": 0.5, "high": 5.0}, ""),
    (
        "openrlhf",
        f"{OPENRLHF_CALL} --algo.advantage.is_correction_type seq-mask-tis",
        {"level": "Geometric", "mode": "Mask", "low": 0.5, "high": 5.0},
        "by the response's ratio, not by each token's",
    ),
    ("verl", "rollout_is=sequence", {"level": "Sequence", "mode": "Truncate", "high": 2.0}, ""),
    (
        "verl",
        "rollout_is=token rollout_is_batch_normalize=true rollout_token_veto_threshold=1e-4 rollout_rs=seq_max_k2",
        {"level": "Token", "mode": "Truncate", "high": 2.0, "normalize": True, "veto": 1e-4},
        "rollout_rs seq_max_k2 is left out",
    ),
    (
        "verl",
        "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.8_1.25",
        {"level": "Geometric", "mode": "Mask", "low": 0.8, "high": 1.25},
        "verl's rollout_rs alone does not",
    ),
]


@each_case(("project", "text", "expected", "check"), CORRECTIONS)
def test_corrections_of_a_mismatch_keep_their_bounds(
    project: str, text: str, expected: dict[str, Any], check: str
) -> None:
    if project == "verl":
        options = " ".join(f"algorithm.rollout_correction.{each}" for each in text.split())
        text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {options}"
    draft = convert(text, project, source="FILE")
    assert draft.get("algorithm.rolloutCorrection") == pytest.approx(expected)
    assert any(check in each for each in draft.checks)


def test_the_command_writes_a_manifest_that_validate_takes(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    output = tmp_path / "job.yaml"
    done = CliRunner().invoke(app, ["import", str(tmp_path / "run.sh"), "--from", "verl", "--output", str(output)])
    assert done.exit_code == 0
    assert done.stdout == ""
    assert "unknown: made.up" in done.stderr.splitlines()
    assert "# - made.up" in output.read_text().splitlines()
    assert CliRunner().invoke(app, ["validate", str(output)]).stdout.startswith("ok\n")


@pytest.mark.parametrize(
    ("project", "text", "sentence"),
    [
        (
            "verl",
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=gpg",
            "adv_estimator gpg is no algorithm here",
        ),
        ("verl", "a: [1", "line 1: cannot be read"),
        (
            "verl",
            "python -m verl.trainer.main_ppo data.train_batch_size=many",
            'spec.training.promptBatchSize: is "many"',
        ),
        ("openrlhf", "echo hello", "it calls no openrlhf.cli.train_... program"),
        (
            "openrlhf",
            "python -m openrlhf.cli.train_kto --a 'b",
            'line 1: cannot be read as bash: "\'b"',
        ),
        ("trl", "model_name_or_path: a/b", "say --algorithm"),
        ("trl", "trl bco --beta 1", "trl bco is no algorithm here"),
        ("trl", "reward_funcs: [accuracy_reward]", "the manifest is not valid yet:"),
        ("trl", "reward_funcs: [a]\nmax_steps: .inf", "max_steps: inf is not what trl takes"),
        ("openrlhf", "openrlhf.cli.train_ppo_ray --data.max_len abc", ": data.max_len: 'abc' is not what"),
        ("verl", "a: 1\n---\nb: 2", "holds 2 YAML documents, expected one"),
        ("other", "a: 1", "--from: there is no other"),
    ],
)
def test_what_cannot_be_imported_is_told(project: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    done = CliRunner().invoke(app, ["import", str(tmp_path / "file"), "--from", project])
    assert done.exit_code == ExitCode.SPEC
    assert sentence in done.stderr


def test_flags_have_no_one_or_several_values() -> None:
    assert flags(["--c", "1", "--on", "--d=7", "--e", "0.9", "0.95"]) == {"c": 1, "on": True, "d": 7, "e": [0.9, 0.95]}


def test_weights_stay_with_their_functions_where_one_is_unknown() -> None:
    text = "reward_funcs: [accuracy, tag_count, format]\nreward_weights: [1.0, 2.0, 3.0]\n"
    draft = convert(text + "model_name_or_path: a/b\ndataset_name: a/c\n", "trl", source="FILE")
    assert [part["weight"] for part in draft.get("models.reward.sum")] == [1.0, 3.0]
    assert "models.reward: there is no tag_count here" in draft.checks


@pytest.mark.parametrize(
    ("command", "algorithm"),
    [
        ("accelerate launch --num_processes 8 trl/scripts/sft.py --model_name_or_path a/b --dataset_name a/c", "SFT"),
        ("accelerate launch src/open_r1/grpo.py --model_name_or_path a/b --dataset_name a/c", "GRPO"),
        ("python examples/scripts/reward_modeling.py --model_name_or_path a/b --dataset_name a/c", "RewardModel"),
    ],
)
def test_a_file_of_trl_is_a_program_of_trl(command: str, algorithm: str) -> None:
    draft = convert(command, "trl", source="FILE")
    assert draft.algorithm == algorithm
    assert not draft.unknown, "flags of accelerate are none of TRL's"


def test_another_program_of_verl_is_refused() -> None:
    with pytest.raises(SpecError, match=r"main_ppo is read, not verl.trainer.sft_trainer"):
        convert("torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet", "verl", source="FILE")


def test_images_are_a_loss_and_no_detail() -> None:
    draft = convert(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.image_key=images", "verl", source="F"
    )
    assert "data.image_key" in draft.lost


def test_bounds_of_verl_become_ours_on_each_side() -> None:
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.clip_ratio_low": 10,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": "0.5_4.0",
    }
    options = " ".join(f"{key}={value}" for key, value in given.items())
    draft = convert(f"python3 -m verl.trainer.main_ppo {options}", "verl", source="FILE")
    assert draft.get("algorithm.clipRange") == 0.99
    expected = {"level": "Token", "mode": "Mask", "low": 0.5, "high": 4.0}
    assert draft.get("algorithm.rolloutCorrection") == expected


def test_a_share_of_the_run_is_no_number_of_steps() -> None:
    text = "trl grpo --model_name_or_path a/b --dataset_name a/c --reward_funcs accuracy_reward --save_steps 0.1"
    draft = convert(f"{text} --eval_strategy steps --eval_steps 0.5", "trl", source="FILE")
    Job.parse(draft.document())
    assert draft.lost["save_steps"] == "0.1 is a share of the run; write a number of steps"
    assert "evaluation.everySteps: 0.5 is a share of the run; write a number of steps" in draft.checks


def test_a_script_within_yaml_is_read() -> None:
    step = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=org/sft"
    text = f"name: train\njobs:\n  - steps:\n    - run: |\n        cd /tmp\n        {step}\n"
    assert convert(text, "verl", source="FILE").get("models.actor.uri") == "hf://org/sft"


def test_a_program_that_is_named_by_its_address_is_read() -> None:
    text = 'uv run "https://example.com/trl/scripts/sft.py" \\\n  --model_name_or_path a/b --dataset_name a/c'
    draft = convert(text, "trl", source="FILE")
    assert (draft.algorithm, draft.get("models.actor.uri")) == ("SFT", "hf://a/b")


def test_rewards_that_are_unknown_are_to_be_written() -> None:
    text = "trl grpo --model_name_or_path a/b --dataset_name a/c --reward_funcs mine yours --reward_weights 1 2"
    draft = convert(text, "trl", source="FILE")
    parts = [(each["weight"], each["reward"]) for each in draft.get("models.reward.sum")]
    assert parts == [(1, {"entrypoint": "rewards:mine"}), (2, {"entrypoint": "rewards:yours"})]
    assert "models.reward: write the functions of these entry points: docs/rewards.md" in draft.checks
