"""Setting from which every worker is built, and the base class of workers that train a model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.job_spec import Model, ScoringModel
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.chat import EndTokens
from rlhf_trainer.checkpoint import UploadFolder
from rlhf_trainer.data.instructions import set_chat_template
from rlhf_trainer.data.uri import folder_or_name
from rlhf_trainer.errors import ConfigError, TrainerError
from rlhf_trainer.expert_rows import REPLAYED, ROUTED, expert_count
from rlhf_trainer.ops.masks import row_sums
from rlhf_trainer.ops.running import RunningMoments
from rlhf_trainer.protocols import ONE_TO_ALL
from rlhf_trainer.training.adapters import add_adapter, initial_weights, write_adapter_config
from rlhf_trainer.training.distributed import device_here, sum_over_ranks
from rlhf_trainer.training.link_probe import Speeds, measure
from rlhf_trainer.training.loading import load_config, load_end_tokens, load_language_model, load_scorer, load_tokenizer
from rlhf_trainer.training.model_input import TokenBatch
from rlhf_trainer.training.models import LanguageModel, Scorer, inner
from rlhf_trainer.training.rope import fix_rope
from rlhf_trainer.training.saving import CONFIG_FOLDER, disk_errors, save_config_and_tokenizer, save_model
from rlhf_trainer.training.sharding import ShardedModel, shard
from rlhf_trainer.training.trainer import ModelRunner, Trainer
from rlhf_trainer.types import PARENTS, Batch, Fields, register
from rlhf_trainer.upload_pace import UploadPace

TEXT_FIELDS = ("tokens", "attention_mask", "response_mask")
"""Fields of a text: token ids of prompt and response, mask of the real tokens, mask of the response's tokens."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetting:
    """Setting of a worker: its job, and the model that the worker holds."""

    job: Job
    role: Role
    model: Model
    folder: str
    """Local folder of the worker's model, or the model's name on the hub."""
    total_steps: int
    actor: tuple[Model, str] | None = None
    """Actor and its folder, if this model scores the responses with another tokenizer than the actor's; else None."""
    layout: ParallelSizes | None = None
    """Layout of the model over the ranks of its pool; None: every rank is a data-parallel one."""
    fuses_updates: bool = False
    """Whether `update_actor` also updates the critic of the same process, with fused passes."""

    @property
    def path(self) -> str:
        """Job's name and the manifest's field of the model, for error messages."""
        return f"{self.job.name}: spec.models.{self.job.spec.models.field(self.role)}"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Floating-point type in which the model computes on this rank."""
        return self.dtype(on_gpu=device_here().type == "cuda")

    def dtype(self, *, on_gpu: bool) -> torch.dtype:
        """Return the floating-point type of `training.precision`; Auto is float32 on CPU and bfloat16 on GPUs."""
        precision = self.job.spec.training.precision
        is_bfloat16 = on_gpu if precision == "Auto" else precision == "BF16"
        return torch.bfloat16 if is_bfloat16 else torch.float32

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Prefix a TrainerError of the `with` block with job and model field, as far as its text names none."""
        try:
            yield
        except TrainerError as error:
            if str(error).startswith(f"{self.job.name}: "):
                raise
            field = f"spec.models.{self.job.spec.models.source_field(self.role)}: "
            raise type(error)(f"{self.job.name}: {field * (not str(error).startswith('spec.'))}{error}") from error

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; it has the job's chat template if the actor has the same tokenizer."""
        if self.actor is None:
            return self.actors_tokenizer()
        model = self.model
        with self.naming():
            return load_tokenizer(self.folder, trust_remote_code=model.trust_remote_code, revision=model.revision)

    def config(self) -> PreTrainedConfig:
        model = self.model
        with self.naming():
            return load_config(self.folder, trust_remote_code=model.trust_remote_code, revision=model.revision)

    @property
    def replays_routing(self) -> bool:
        """Whether training replays the generator's experts; `run.worker_specs.with_routing` decides if it is unset."""
        return self.job.spec.rollout.routing == "Replay"

    def must_replay_routing(self) -> bool:
        """Whether the job replays this actor's routing of tokens: the job allows it, and the model has experts.

        ConfigError if the manifest asks for replay, but the model is dense, or its routers are not known.
        """
        has_experts = self.job.may_replay_routing and expert_count(self.config()) > 0
        if self.replays_routing and not (has_experts and self.config().model_type in REPLAYED):
            missing = "routers that the trainer knows" if has_experts else "experts"
            raise ConfigError(f"{self.job.name}: spec.rollout.routing: is Replay, but {self.folder} has no {missing}")
        return has_experts

    def end_tokens(self, tokenizer: PreTrainedTokenizerBase) -> EndTokens:
        """Return the tokens that end a response of the model; tokenizer: the model's own, as `tokenizer` loads it."""
        with self.naming():
            return load_end_tokens(self.folder, tokenizer, revision=self.model.revision)

    def actors_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the actor's tokenizer: batches hold its token ids."""
        model, folder = self.actor or (self.model, self.folder)
        with self.naming():
            found = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, revision=model.revision)
        return set_chat_template(found, self.job.spec.data, f"{self.job.name}: spec.data")

    def language_model(self, *, may_initialise: bool = False) -> LanguageModel:
        """Return the causal language model, without memory for its weights yet; see `load_language_model`."""
        model = load_language_model(
            self.folder,
            seed=self.job.spec.training.seed,
            trust_remote_code=self.model.trust_remote_code,
            revision=self.model.revision,
            may_initialise=may_initialise and self.model.lora is None,
        )
        self.adapt(model)
        return model

    def scorer(self, *, may_add_head: bool) -> Scorer:
        """Return the model with a score head, without memory for its weights yet; see `load_scorer`."""
        model = load_scorer(
            self.folder,
            seed=self.job.spec.training.seed,
            trust_remote_code=self.model.trust_remote_code,
            revision=self.model.revision,
            path=f"{self.job.name}: spec.models.{self.job.spec.models.source_field(self.role)}",
            may_add_head=may_add_head,
            label=self.model.label if isinstance(self.model, ScoringModel) else None,
        )
        self.adapt(model)
        return model

    def adapt(self, model: LanguageModel | Scorer) -> None:
        """Add the LoRA adapter to the model, if the manifest asks for one."""
        lora, path = self.model.lora, f"{self.path}.lora"
        if lora is None:
            return
        adapter = add_adapter(model, lora, self.model, self.folder, seed=self.job.spec.training.seed, path=path)
        if lora.initial:
            shapes = {name: tuple(each.shape) for name, each in inner(model).named_parameters() if each.requires_grad}
            initial = initial_weights(adapter, folder_or_name(lora.initial), shapes, path=f"{path}.initial")
            model.weights = {**(model.weights or {}), **initial}

    def frozen(self, model: LanguageModel | Scorer) -> ModelRunner:
        """Shard a model for forward passes only; the weights are held in the type in which the model computes."""
        model.requires_grad_(False)
        return ModelRunner(self._sharded(model, recompute_activations=False), **self._runner_options(model))

    def trainer(self, model: LanguageModel | Scorer) -> Trainer:
        """Shard a model for training, with its optimizer."""
        assert self.model.optimizer is not None, "the contract gives every trained model an optimizer"
        recomputes, steps_in_host = bool(self.model.gradient_checkpointing), self.model.offload == "OptimizerInHost"
        compresses = self.job.spec.training.gradient_compression == "TopK"
        return Trainer(
            self._sharded(model, recompute_activations=recomputes, steps_in_host=steps_in_host, compresses=compresses),
            optimizer=self.model.optimizer,
            total_steps=self.total_steps,
            max_skipped_updates=self.job.spec.training.max_skipped_updates,
            path=self.path,
            router_aux_loss=self._router_aux_loss(model),
            **self._runner_options(model),
        )

    def _router_aux_loss(self, model: LanguageModel | Scorer) -> float:
        given = self.job.spec.training.router_aux_loss
        if given is not None or self.job.spec.algorithm.data != "completions":
            return given or 0.0
        return float(getattr(inner(model).config, "router_aux_loss_coef", 0.0))

    def _sharded(self, model: LanguageModel | Scorer, **options: bool) -> ShardedModel:
        data, compile_layers = self.job.spec.data, self.job.spec.training.compile
        with self.naming():
            fix_rope(inner(model), data.max_prompt_tokens + data.max_response_tokens)
            return shard(model, self.layout, compute_dtype=self.compute_dtype, compile_layers=compile_layers, **options)

    def _runner_options(self, model: LanguageModel | Scorer) -> dict[str, Any]:
        training, hidden = self.job.spec.training, inner(model).config.hidden_size
        tokens = self.job.micro_batch_tokens("GPU" if device_here().type == "cuda" else "CPU", hidden=hidden)
        return {
            "token_budget": tokens,
            "role": self.role,
            "offload": self.model.offload,
            "attention": training.attention,
            "kernels": training.kernels,
            "share_prompts": training.share_prompts,
        }


class TrainedModel:
    """Base class of a worker whose model is trained and saved."""

    def __init__(self, setting: WorkerSetting, trainer: Trainer) -> None:
        self.setting = setting
        self.trainer = trainer
        self.tokenizer = setting.tokenizer()
        self.own_tensors = trainer.state.own_tensors
        """Tensors by name that a subclass keeps between steps, the same on every rank; checkpoints hold them, too."""
        self._pace: UploadPace | None = None

    @register(ONE_TO_ALL)
    def probe_links(self) -> Speeds:
        """Measure the speed of this rank's device and of its links in the groups of the model."""
        return measure(self.trainer.model.mesh)

    @register(ONE_TO_ALL)
    def save(self, *, folder: str) -> None:
        """Write the trained model and its tokenizer as a Hugging Face directory."""
        with self.trainer.offloader.in_use():
            save_model(self.trainer.model, self.tokenizer, Path(folder))

    @register(ONE_TO_ALL, phase="checkpoint")
    def begin_checkpoint(self, *, uri: str, copies: bool, bytes_per_second: float = 0.0) -> None:
        """Begin to save weights, optimizer moments, random state below `uri`; copies: see `TrainerState.begin_save`.

        bytes_per_second: limit for all uploads of this node together; 0: no limit.
        """
        self._pace = UploadPace(bytes_per_second) if bytes_per_second else None
        upload_folder = UploadFolder(f"{uri}/{self.setting.role}", self._pace)
        if dist.get_rank() == 0:
            with disk_errors("the checkpoint", upload_folder.folder):
                self.write_config(upload_folder.folder / CONFIG_FOLDER)
        with self.trainer.offloader.in_use(moments=True):
            self.trainer.state.begin_save(upload_folder.folder, then=upload_folder.upload, copies=copies)

    def write_config(self, folder: Path) -> None:
        """Write the model's config and tokenizer, and the config of its adapter if it has one, to a folder."""
        save_config_and_tokenizer(inner(self.trainer.model.module), self.tokenizer, folder)
        if self.trainer.model.adapter:
            write_adapter_config(self.trainer.model.adapter, folder)

    @register(ONE_TO_ALL)
    def end_checkpoint(self, *, waits: bool = True) -> str:
        """Return the checksum of this rank's part of the last checkpoint, empty while it is being written.

        waits: lift the limit of uploads, and wait until the checkpoint is written.
        """
        if waits and self._pace:
            self._pace.lift()
        return self.trainer.state.end_save(waits=waits)

    @register(ONE_TO_ALL)
    def counters(self) -> dict[str, Any]:
        """Return the worker's state for a checkpoint besides tensors: JSON values, the same on every rank."""
        steered = self.trainer.rate_factor
        rate = {"rate_factor": steered.value} if steered else {}
        return {"skipped_in_a_row": self.trainer.skipped_in_a_row, **rate}

    @register(ONE_TO_ALL)
    def set_counters(self, *, counters: Mapping[str, Any]) -> None:
        """Restore the worker's state from a checkpoint, as `counters` returned it."""
        self.trainer.skipped_in_a_row = counters["skipped_in_a_row"]
        if steered := self.trainer.rate_factor:
            steered.value = counters["rate_factor"]

    @register(ONE_TO_ALL)
    def restore(self, *, uri: str) -> None:
        """Load the model's training state from a checkpoint, which any number of ranks may have written."""
        with self.trainer.offloader.in_use(moments=True):
            self.trainer.state.load(f"{uri}/{self.setting.role}")


def text_fields(fields: Fields, *if_there: str) -> tuple[str, ...]:
    """Return field names for `text_of`: `TEXT_FIELDS`, and `PARENTS` and `if_there` where `fields` has them."""
    return (*TEXT_FIELDS, *(name for name in (PARENTS, *if_there) if name in fields))


def text_of(
    fields: Fields, names: Sequence[str] | None = None, *, temperature: float = 1.0, entropy: bool = False
) -> TokenBatch:
    """Return the texts of a batch as model input; the model's output is read only at the response tokens.

    names: fields of the text in the order of `TEXT_FIELDS`, then perhaps `PARENTS` and `ROUTED`; None: `text_fields`.
    """
    names = names or text_fields(fields)
    tokens, attention, response = (fields[name] for name in names[: len(TEXT_FIELDS)])
    parents, experts = (fields[name] if name in names else None for name in (PARENTS, ROUTED))
    return TokenBatch(
        tokens=tokens,
        lengths=attention.sum(1).long(),
        parents=parents,
        read=response,
        temperature=temperature,
        entropy=entropy,
        experts=experts,
    )


def log_probs_by(
    model: ModelRunner, batch: Batch, names: Sequence[str] | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Return the log-probabilities float32 [B, T] of response tokens, without gradient; names: as in `text_of`."""
    return model.infer(
        {name: batch[name] for name in names or text_fields(batch.fields)},
        lambda micro: [text_of(micro, names, temperature=temperature)],
        lambda found, _: found.log_probs,
    )


def side_fields(side: str) -> tuple[str, str, str]:
    """Return the field names of one side (chosen or rejected) of pairs of texts, in the order of `TEXT_FIELDS`."""
    return (f"{side}_tokens", f"{side}_mask", f"{side}_response_mask")


def side_log_probs(model: ModelRunner, batch: Batch, side: str) -> Tensor:
    """Return the log-probabilities [B] of one side ("chosen" or "rejected") of response pairs, without gradient."""
    names = side_fields(side)
    return row_sums(log_probs_by(model, batch, names), batch[names[-1]])


def whole_texts(micro: Fields) -> list[TokenBatch]:
    """Return each row's whole text, prompt and response, as model input for a model that scores texts."""
    return [replace(text_of(micro), read=None)]


def both_texts(micro: Fields) -> list[TokenBatch]:
    """Return the model inputs of pairs of texts: the chosen ones, and then the rejected ones."""
    texts = []
    for tokens, attention, response in map(side_fields, ("chosen", "rejected")):
        whole = TokenBatch(tokens=micro[tokens], lengths=micro[attention].sum(1).long())
        texts.append(text_of(micro, (tokens, attention, response)) if response in micro else whole)
    return texts


def with_step(moments: RunningMoments, values: Tensor, counts: Tensor) -> RunningMoments:
    """Return the running moments updated by a step's values [B] on all ranks; counts [B]: 1 to include a value, else 0.

    If any value is not finite, the moments stay the same, as NaN would spoil all later moments.
    """
    count, total = sum_over_ranks([counts.sum(), (values * counts).sum()])
    mean = total / max(count, 1.0)
    deviation = sum_over_ranks([((values - mean) ** 2 * counts).sum()])[0]
    return moments.merge(count, mean, deviation) if math.isfinite(deviation) else moments


def at_last_token(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the entries of `values` [B, T] at the last token of each row: [B]."""
    last = (attention_mask.sum(1).long() - 1).clamp(min=0)
    return values.gather(1, last[:, None])[:, 0]
