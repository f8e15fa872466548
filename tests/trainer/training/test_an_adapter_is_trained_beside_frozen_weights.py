"""Low-rank adapters: PEFT reads what is trained, and a whole model's gradient says what it has to be."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_api.names import Role
from rlhf_api.spec.job_spec import Model, Optimizer
from rlhf_api.spec.lora import Lora
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.errors import ConfigError, DataError, TrainerError
from rlhf_trainer.training.adapters import add_adapter, without_adapter
from rlhf_trainer.training.head import Likelihood
from rlhf_trainer.training.loading import load_language_model, load_tokenizer
from rlhf_trainer.training.saving import save_model
from rlhf_trainer.training.sharding import shard
from rlhf_trainer.training.trainer import Trainer
from rlhf_trainer.types import Batch, Fields
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.preference import PreferenceActorWorker
from rlhf_trainer.workers.reference import ReferenceWorker
from rlhf_trainer.workers.reward import RewardTrainer
from tests.trainer.jobs import job
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.reading import all_tokens, log_probs
from tests.trainer.tiny import divisible_config, save_tiny
from tests.trainer.training.test_dpo_compares_with_the_reference import pairs
from tests.trainer.weights import weights_on_first_rank

TOKENS = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(9))
RANK, ALPHA = 4, 12
SCALE = ALPHA / RANK
Tensors = dict[str, Tensor]


def trainer_of(folder: str, layout: ParallelSizes, dtype: torch.dtype = torch.float32, **options: Any) -> Trainer:
    model = load_language_model(folder, seed=0, trust_remote_code=False, revision=None)
    source, offload = Model(uri=f"file://{folder}"), options.pop("offload", "None")
    add_adapter(model, Lora(rank=RANK, alpha=ALPHA, **options), source, folder, seed=1, path="models.actor.lora")
    in_host = offload == "OptimizerInHost"
    sharded = shard(model, layout, compute_dtype=dtype, recompute_activations=True, steps_in_host=in_host)
    return Trainer(
        sharded,
        token_budget=1024,
        optimizer=Optimizer(learning_rate=1e-2),
        total_steps=10,
        max_skipped_updates=0,
        path="models.actor",
        role="actor",
        offload=offload,
        attention="Auto",
    )


def train(trainer: Trainer, steps: range) -> Tensors:
    """Every rank sees the same rows; afterwards rank 0 gives all trained parameters."""
    for step in steps:
        tokens = torch.randint(3, 500, (2, 12), generator=torch.Generator().manual_seed(step))

        def loss(found: Likelihood, micro: Fields) -> Tensor:
            share: Tensor = -(found.log_probs * micro["mask"]).sum() / 22
            return share / trainer.mesh.layout.data

        trainer.update({"tokens": tokens, "mask": torch.ones(2, 12)}, all_tokens, loss, step=step)
    with trainer.offloader.in_use():
        weights = weights_on_first_rank(trainer.model)
    return {name: each for name, each in weights.items() if "lora" in name}


@dataclass
class Learned:
    """What rank 0 saw."""

    log_probs: Tensor
    without: Tensor
    """Those of the model without its adapter."""
    gradients: Tensors
    """Of the trained parameters, of the sum of those log-probabilities; with one rank only."""
    frozen: set[torch.dtype]
    moments: int
    """Numbers in the optimizer's moments."""
    trained: int
    first: Tensors
    weights: Tensors


def learn(folder: str, output: str, layout: ParallelSizes, dtype: torch.dtype, options: dict[str, Any]) -> Learned:
    """Two updates, then a checkpoint and the saved model, and two more updates."""
    trainer = trainer_of(folder, layout, dtype, **options)
    first = train(trainer, range(1, 3))
    found = trainer.infer({"tokens": TOKENS}, all_tokens, log_probs)
    with without_adapter(trainer.model.module):
        without = trainer.infer({"tokens": TOKENS}, all_tokens, log_probs)
    with trainer.offloader.in_use(moments=True):
        trainer.state.begin_save(Path(output) / "checkpoint", then=lambda: None, copies=True)
        trainer.state.end_save()
        tokenizer = load_tokenizer(folder, trust_remote_code=False, revision=None)
        save_model(trainer.model, tokenizer, Path(output) / "model")
    gradients = {}
    parameters = dict(trainer.model.module.named_parameters())
    if layout.world_size == 1:
        (micro,) = trainer.split({"tokens": TOKENS}, all_tokens, phase="update")
        torch.autograd.backward(trainer.model.module(micro.given.tokens, micro.given).log_probs.sum())
        gradients = {
            name: each.grad.full_tensor() for name, each in parameters.items() if isinstance(each.grad, DTensor)
        }
        for each in parameters.values():
            each.grad = None
    optimizer = trainer._optimizer
    return Learned(
        log_probs=found,
        without=without,
        gradients=gradients,
        frozen={each.dtype for each in parameters.values() if not each.requires_grad},
        moments=sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in optimizer.state.values()),
        trained=sum(each.numel() for each in parameters.values() if each.requires_grad),
        first=first,
        weights=train(trainer, range(3, 5)),
    )


ONE = ParallelSizes(data=1)
LAYOUTS = {
    "2-2-1": (ParallelSizes(data=1, pipeline=2, tensor=2), {}),
    "1-1-2, in host memory": (ParallelSizes(data=2), {"offload": "OptimizerInHost"}),
    "1-2-1": (ParallelSizes(data=1, tensor=2), {}),
    "1-2-2 in 2 replicas": (ParallelSizes(data=2, replicas=2, tensor=2), {}),
    "1-1-3": (ParallelSizes(data=3), {}),
    "2-1-1, all offloaded": (ParallelSizes(data=1, pipeline=2), {"offload": "All"}),
}
FAST = ("1-2-1", "1-1-2, in host memory")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
Folders = tuple[str, str, Learned]
"""(the model, what was learned from it on one rank, what that rank saw)."""


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("lora")
    folder = save_tiny(root / "base", seed=3, config=divisible_config(request.param))
    (seen,) = run_kept_ranks(1, learn, folder, str(root / "one"), ONE, torch.float32, {})
    return folder, str(root / "one"), seen


def log_probs_of(model: Any) -> Tensor:
    """log-probabilities [2, 12] of all tokens but the first, which is 0."""
    logits = model(input_ids=TOKENS).logits[:, :-1]
    found = torch.log_softmax(logits, -1).gather(-1, TOKENS[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def test_peft_computes_the_same(learned: Folders) -> None:
    folder, output, seen = learned
    base = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(log_probs_of(base), seen.without, rtol=0, atol=2e-5)
        adapted = PeftModel.from_pretrained(base, f"{output}/adapter")
        torch.testing.assert_close(log_probs_of(adapted), seen.log_probs, rtol=0, atol=2e-5)
        assert (seen.log_probs - seen.without).abs().max() > 0.1
        merged = AutoModelForCausalLM.from_pretrained(f"{output}/model")
        torch.testing.assert_close(log_probs_of(merged), seen.log_probs, rtol=0, atol=2e-5)
        own = dict(merged.named_parameters())
        for name, weight in adapted.merge_and_unload().named_parameters():
            torch.testing.assert_close(own[name], weight, rtol=0, atol=1e-6)


def test_gradients_are_those_of_the_whole_matrix_projected(learned: Folders) -> None:
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, where W is that of the merged model."""
    _, output, seen = learned
    merged = AutoModelForCausalLM.from_pretrained(f"{output}/model")
    torch.autograd.backward(log_probs_of(merged).sum())
    whole = {name: each.grad for name, each in merged.named_parameters()}
    assert len(seen.gradients) == 2 * 7 * 4
    for name, found in seen.gradients.items():
        module, _, kind = name.replace("_checkpoint_wrapped_module.", "").removeprefix("causal_lm.").rpartition(".")
        of_w, a, b = whole[f"{module}.weight"], seen.first[f"{module}.lora_a"], seen.first[f"{module}.lora_b"]
        expected = SCALE * (of_w @ a.T if kind == "lora_b" else b.T @ of_w)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_only_the_adapter_has_moments(learned: Folders) -> None:
    folder, output, seen = learned
    assert seen.moments == 2 * seen.trained == 2 * sum(each.numel() for each in seen.first.values())
    saved = load_file(f"{output}/checkpoint/shard-0.safetensors")
    assert len(saved) == len(seen.first) * 4  # a weight, two moments and a step each
    assert all("lora" in name for name in saved)
    config = json.loads(Path(output, "adapter", "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == folder


@pytest.mark.parametrize("name", CASES)
def test_every_layout_learns_and_saves_the_same(name: str, learned: Folders, tmp_path: Path) -> None:
    folder, output, seen = learned
    layout, options = LAYOUTS[name]
    found = run_kept_ranks(layout.world_size, learn, folder, str(tmp_path), layout, torch.float32, options)[0]
    torch.testing.assert_close(found.log_probs, seen.log_probs, rtol=0, atol=1e-3)
    for part in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, other = (load_file(str(Path(root, part))) for root in (output, tmp_path))
        assert one.keys() == other.keys()
        for key, weight in one.items():
            torch.testing.assert_close(other[key], weight, rtol=0, atol=1e-3)


def go_on(folder: str, output: str, layout: ParallelSizes) -> tuple[Tensors, Tensors]:
    """(what a checkpoint gives, two updates later)."""
    trainer = trainer_of(folder, layout)
    train(trainer, range(1, 2))  # something to be forgotten
    trainer.state.load(f"{output}/checkpoint")
    return train(trainer, range(0)), train(trainer, range(3, 5))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ONE, marks=pytest.mark.slow),
        ParallelSizes(data=2),
        pytest.param(LAYOUTS["2-2-1"][0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_goes_on_on_another_layout(layout: ParallelSizes, learned: Folders) -> None:
    folder, output, seen = learned
    loaded, later = run_kept_ranks(layout.world_size, go_on, folder, output, layout)[0]
    for name, weight in seen.first.items():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    for name, weight in seen.weights.items():
        torch.testing.assert_close(later[name], weight, rtol=0, atol=1e-3)


def test_a_base_in_bfloat16_is_merged_as_it_was_stored(learned: Folders, tmp_path: Path) -> None:
    """A run holds the base in the type that it computes in, here bfloat16; the merged model is of the float32 files."""
    folder, _, _ = learned
    seen = run_kept_ranks(2, learn, folder, str(tmp_path), ParallelSizes(data=2), torch.bfloat16, {})[0]
    assert seen.frozen == {torch.bfloat16}
    base, merged = (load_file(str(Path(each) / "model.safetensors")) for each in (folder, tmp_path / "model"))
    name = "model.layers.1.mlp.down_proj"
    delta = SCALE * seen.first[f"{name}.lora_b"] @ seen.first[f"{name}.lora_a"]
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + delta, rtol=0, atol=1e-6)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


DATA = {"train": {"uri": "package://rlhf_examples/helpful/train.jsonl"}}


def setting_of(folder: str, algorithm: str, role: Role, lora: dict[str, Any] | None) -> WorkerSetting:
    entry = {"uri": f"file://{folder}", "optimizer": {"learningRate": 1e-2}, "lora": lora}
    spec = {
        "algorithm": {"name": algorithm},
        "models": {"actor" if role == "reference" else role: entry},
        "data": DATA,
        "training": {"totalSteps": 1, "batchSize": 2, "precision": "FP32"},
    }
    models = job(Path(folder), algorithm.lower(), spec)
    model = models.spec.models.by_role()["actor"] if role == "reference" else models.models()[role]
    return WorkerSetting(job=models, role=role, model=model, folder=folder, total_steps=1)


def compared_with_a_reference(folder: str) -> tuple[Fields, Fields, Fields]:
    """log-probabilities of pairs by a reference, and by the actor without its adapter before and after it learns."""
    actor = PreferenceActorWorker(setting_of(folder, "DPO", "actor", {"rank": 2}))
    reference = ReferenceWorker(setting_of(folder, "DPO", "reference", None))
    batch = Batch(step=1, start=0, size=2, fields=pairs())
    by_model, before = reference.compute_pair_log_prob(batch), actor.compute_ref_pair_log_prob(batch)
    actor.update_actor(batch.with_fields(before))
    assert actor.evaluate_pairs(batch.with_fields(before)) == (2.0, 2.0)
    return by_model, before, actor.compute_ref_pair_log_prob(batch)


def test_the_actor_without_its_adapter_is_the_reference(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", seed=3)
    ((by_model, before, after),) = run_kept_ranks(1, compared_with_a_reference, folder)
    for name, expected in by_model.items():
        assert torch.equal(before[name], expected)
        assert torch.equal(after[name], expected)


def save_reward_model(folder: str, output: str, initial: str | None) -> float:
    """One update of a reward model; returns the accuracy on the same pairs."""
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"], "initial": initial and f"file://{initial}"}
    worker = RewardTrainer(setting_of(folder, "RewardModel", "reward", lora))
    batch = Batch(step=1, start=0, size=2, fields=pairs())
    if initial is None:
        for _ in range(5):
            worker.update_reward(batch)
    worker.save(folder=f"{output}/model")
    return worker.evaluate_pairs(batch)[0]


def test_a_reward_model_goes_on_from_its_adapter_and_head(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", seed=3)
    first, again = (str(tmp_path / name) for name in ("first", "again"))
    assert run_kept_ranks(1, save_reward_model, folder, first, None) == [2.0]
    assert run_kept_ranks(1, save_reward_model, folder, again, f"{first}/adapter") == [2.0]
    for part in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, other = (load_file(f"{root}/{part}") for root in (first, again))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    adapted = PeftModel.from_pretrained(base, f"{first}/adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(f"{first}/model")
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, merged(TOKENS).logits, rtol=0, atol=1e-5)


def refusal(folder: str, lora: dict[str, Any]) -> str:
    try:
        PreferenceActorWorker(setting_of(folder, "DPO", "actor", lora))
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_cannot_be_adapted_is_one_sentence(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", seed=3)
    (found,) = run_kept_ranks(1, refusal, folder, {"targets": ["w1"]})
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    expected = f"dpo: spec.models.actor.lora.targets: the model has no w1; there are {names}"
    assert found == f"{ConfigError.__name__}: {expected}"
    config = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"], use_rslora=True, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(str(tmp_path / "peft"))
    initial, field = f"file://{tmp_path}/peft", f"dpo: spec.models.actor.lora.initial: {tmp_path}/peft"
    for lora, expected in (
        ({}, f"{field}: r of the adapter is 8, expected 16"),
        ({"rank": 8, "targets": ["q_proj"]}, f"{field}: use_rslora of the adapter is True, expected False"),
    ):
        (found,) = run_kept_ranks(1, refusal, folder, {**lora, "initial": initial})
        assert found == f"{DataError.__name__}: {expected}"
    (found,) = run_kept_ranks(1, refusal, folder, {"initial": f"file://{folder}"})
    assert found.endswith(f"{folder}: is no PEFT directory: it has no adapter_config.json")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", seed=3)
    config = json.loads(Path(folder, "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    Path(folder, "config.json").write_text(json.dumps(config))
    (found,) = run_kept_ranks(1, refusal, folder, {})
    sentence = "its weights are quantised, which is not supported, nor with an adapter (QLoRA)"
    assert found == f"{DataError.__name__}: {folder}: {sentence}; take the model that they were made of"
