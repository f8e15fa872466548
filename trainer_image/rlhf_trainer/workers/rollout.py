"""Generation of responses on a rank, and the worker of the role `rollout`."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.spec.rollout import STREAM_SHARES, stream_groups
from rlhf_trainer.data.tokens import Ids
from rlhf_trainer.data.uri import folder_or_name
from rlhf_trainer.environments.environments import Environments
from rlhf_trainer.environments.of_job import environments_of
from rlhf_trainer.errors import ConfigError, NumericsError
from rlhf_trainer.expert_rows import ROUTED, ExpertRows
from rlhf_trainer.generation.endpoints import Endpoints
from rlhf_trainer.generation.vllm_engine import GenerationEngine, Response, response_seed
from rlhf_trainer.hybrid_engine.hybrid_engine import Span, engine_groups, stage_layers
from rlhf_trainer.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP
from rlhf_trainer.rewards.sandboxes import Sandboxes
from rlhf_trainer.row_groups import Outlet, RowGroup
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.training.batching import RowCosts
from rlhf_trainer.training.distributed import device_here, largest_over_ranks
from rlhf_trainer.training.models import LanguageModel, inner
from rlhf_trainer.training.trainer import ModelRunner
from rlhf_trainer.types import PARENTS, Batch, Fields, Marks, register
from rlhf_trainer.workers.agents import AgentResponder
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.episodes import EpisodeResponder, ResponseEnded
from rlhf_trainer.workers.samples import COLUMNS, EPISODES, RAW_PROMPTS, TURN_FIELDS, real_rows, sample_of
from rlhf_trainer.workers.weight_links import (
    InPlaceWeights,
    InterruptingReceiver,
    ServerWeights,
    WeightReceiver,
    servers_of,
)

PROMPT_FIELDS = ("prompt_ids", "prompt_mask", "valid")
ROLLOUT_FIELDS = (
    *("tokens", "attention_mask", "response_mask", "rollout_log_probs"),
    *("finished", "sampled", "policy_version"),
)
LayOut = Callable[[list[int], list[Ids], list[Response], int], dict[str, Tensor]]
"""Function (rows, prompts, responses, width) -> fields of these rows, padded to `width`."""


class Generation:
    """Generation on one rank: each prompt gets one text, or an episode, and the responses are laid out as fields."""

    def __init__(
        self,
        setting: WorkerSetting,
        tokenizer: PreTrainedTokenizerBase,
        generator: GenerationEngine | Endpoints,
        environments: Environments | None = None,
        *,
        agree_on_width: Callable[[int], int] = largest_over_ranks,
        costs: RowCosts | None = None,
    ) -> None:
        """agree_on_width: returns the largest text width of all ranks; costs: estimate of FLOPs, None with servers.

        environments: those of the engine; if given, each response is an episode.
        """
        self._expert_bytes = ExpertRows.of(setting.config()).width if setting.replays_routing else 0
        self._spec, self._tokenizer, self._generator = setting.job.spec, tokenizer, generator
        self._agree_on_width, self._costs = agree_on_width, costs
        self.engine = None if isinstance(generator, Endpoints) else generator
        self._episodes: EpisodeResponder | None = None
        self._has_agent = self._spec.rollout.agent is not None
        if self.engine and environments:
            responder = AgentResponder if self._has_agent else EpisodeResponder
            self._episodes = responder(setting, tokenizer, self.engine, environments)
        self._role = "rollout" if setting.job.generates_apart else "actor"

    def generate(self, batch: Batch, *, do_sample: bool, outlet: Outlet | None) -> Fields:
        """Return the `ROLLOUT_FIELDS` and, for episodes, `TURN_FIELDS`; outlet: gets row groups as responses end."""

        def lay_out(
            rows: Sequence[int], prompts: Sequence[Ids], responses: Sequence[Response], width: int
        ) -> dict[str, Tensor]:
            fields = laid_out(prompts, responses, width=width, pad_token=int(self._tokenizer.pad_token_id))
            if self._expert_bytes:
                fields[ROUTED] = stack_experts(responses, width=width, size=self._expert_bytes)
            if self._has_agent:
                fields[PARENTS] = stack_parents(prompts, responses, width=width)
            fields["response_mask"] = fields["response_mask"] * batch["valid"][rows][:, None]
            fields["sampled"] = torch.full((len(rows),), float(do_sample))
            return fields

        lengths = batch["prompt_mask"].sum(1).long().tolist()
        given = [row[:length].tolist() for row, length in zip(batch["prompt_ids"], lengths, strict=True)]
        stream = RowStream(outlet, batch, lay_out)
        with recorder.span("generation", f"{self._role}.generate_sequences"):
            prompts, responses = self._respond(batch, given, greedy=not do_sample, ended=stream.add)
        longest = max(len(prompt) + len(response.tokens) for prompt, response in zip(prompts, responses, strict=True))
        width = self._agree_on_width(longest)  # so that another pool can join rows of any ranks
        stream.close(width)
        fields = lay_out(list(range(batch.size)), prompts, responses, width)
        recorder.add("tokens", float((fields["attention_mask"] * batch["valid"][:, None]).sum()))
        self._measure_engine(fields)
        if do_sample:
            recorder.maximum("policy_version", fields["policy_version"].max())
            recorder.mean("response_length/mean", fields["response_mask"].sum(), batch["valid"].sum())
            recorder.mean("response_finished/mean", (fields["finished"] * batch["valid"]).sum(), batch["valid"].sum())
            real = real_rows(batch).tolist() if batch.start == 0 else []
            for row in sorted({*real[:1], *real[-1:]}):
                recorder.example(str(sample_of(batch.with_fields(fields), row, self._tokenizer)))
        return {**fields, **(self._episodes.turn_fields(fields) if self._episodes else {})}

    def _respond(
        self, batch: Batch, prompts: list[Ids], *, greedy: bool, ended: ResponseEnded
    ) -> tuple[list[Ids], list[Response]]:
        """Return (prompts, a response to each); an environment or an agent may have replaced some prompts."""
        if self._episodes:
            return self._episodes.respond(batch, prompts, greedy=greedy, ended=ended)
        seed = self._spec.training.seed
        return prompts, self._generator.generate(
            prompts,
            [response_seed(seed, batch.step, row) for row in batch.rows.tolist()],
            max_tokens=self._spec.data.max_response_tokens,
            greedy=greedy,
            ended=lambda row, response: ended(row, prompts[row], response),
        )

    def _measure_engine(self, fields: Fields) -> None:
        """Record the FLOPs of the response tokens (prompts may be cached), and the largest used share of the KV cache.

        Generation by servers is not recorded: they run on devices that are not the job's.
        """
        if self.engine is None or self._costs is None:
            return
        costs, read = self._costs, fields["response_mask"].sum(1).long()
        whole = fields["attention_mask"].sum(1).long()
        done = float((costs.of(whole) - costs.of(whole - read)).sum())
        recorder.add("flops/generation", costs.flops(done, float(read.sum())))
        recorder.maximum("kv_cache_used", self.engine.cache_peak())
        if self._spec.rollout.speculation:
            recorder.mean("draft_acceptance", *map(float, self.engine.drafts()))

    def close(self) -> None:
        """End the engine and the environments of this rank."""
        if self.engine:
            self.engine.close()
        if self._episodes:
            self._episodes.close()


def generation_in_place(
    setting: WorkerSetting, tokenizer: PreTrainedTokenizerBase, runner: ModelRunner, max_sequences: int
) -> tuple[Generation, InPlaceWeights]:
    """Start an engine in the processes of the model; max_sequences: the most responses of this rank at once."""
    config, layout = inner(runner.model.module).config, runner.model.mesh.layout
    engine, environments = start_engine(setting, tokenizer, config, layout, max_sequences)
    weights = InPlaceWeights(setting, runner, engine)
    return Generation(setting, tokenizer, engine, environments, costs=runner.costs), weights


def start_engine(
    setting: WorkerSetting,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    layout: ParallelSizes,
    max_sequences: int,
) -> tuple[GenerationEngine, Environments | None]:
    """Build this rank's part of a generation engine, without weights, and start the environments of a job with turns.

    The environments' module is imported while the engine is built.
    """
    job, layers, groups = setting.job.spec, int(config.num_hidden_layers), engine_groups(layout)
    sandboxes = Sandboxes.of(job.sandbox, sharers=len(groups) // layout.generation_pipeline)
    environments = environments_of(setting.job, sandboxes) if job.rollout.has_turns else None
    draft = job.rollout.speculation.draft if job.rollout.speculation else None
    engine = GenerationEngine(
        setting.folder,
        config=config,
        rollout=job.rollout,
        max_tokens=job.data.max_prompt_tokens + job.data.max_response_tokens,
        max_sequences=max_sequences,
        ends=setting.end_tokens(tokenizer).ids,
        device=device_here(),
        dtype=setting.compute_dtype,
        trust_remote_code=setting.model.trust_remote_code,
        revision=setting.model.revision,
        draft=folder_or_name(draft) if draft else None,
        tensor_groups=groups,
        stage_layers=stage_layers(layout, layers) if layout.generation_pipeline > 1 else (),
    )
    return engine, environments


def turn_transfers(marks: Marks, setting: WorkerSetting) -> Marks:
    """Return a generating worker's transfer declarations; with turns it reads columns and adds `TURN_FIELDS`, too.

    With an agent it reads prompts as they stand in the file, and adds the parents of tokens and facts on episodes. With
    routing replay it adds the experts of tokens.
    """
    mark, rollout = marks["generate_sequences"], setting.job.spec.rollout
    has_turns, has_agent = rollout.has_turns, rollout.agent is not None
    reads = (*mark.reads_if_there, *COLUMNS * has_turns, *(RAW_PROMPTS,) * has_agent)
    adds = (*(mark.adds or ()), *TURN_FIELDS * has_turns, *(PARENTS, EPISODES) * has_agent)
    adds = (*adds, *(ROUTED,) * setting.replays_routing)
    return {**marks, "generate_sequences": replace(mark, reads_if_there=reads, adds=adds)}


class RowStream:
    """Stream of this rank's rows into an outlet: groups of rows in the order in which their responses end."""

    def __init__(self, outlet: Outlet | None, batch: Batch, lay_out: LayOut) -> None:
        """outlet: receives the row groups; None: they are not sent; lay_out: makes the fields of a group's rows."""
        self._outlet, self._start, self._lay_out = outlet, batch.start, lay_out
        self._sizes = deque(len(rows) for rows in stream_groups(batch.size))
        self._ended: list[tuple[int, Ids, Response]] = []

    def add(self, row: int, prompt: Ids, response: Response) -> None:
        """Add a row whose response has ended; the last group waits for `close`."""
        self._ended.append((row, prompt, response))
        while self._outlet and len(self._sizes) > 1 and len(self._ended) >= self._sizes[0]:
            self._send_group()

    def close(self, width: int) -> None:
        """Send the remaining groups after all rows have ended; they report `width`, the batch's width in tokens."""
        while self._outlet and self._sizes:
            self._send_group(width)

    def _send_group(self, width: int = 0) -> None:
        assert self._outlet
        size = self._sizes.popleft()
        ended, self._ended = self._ended[:size], self._ended[size:]
        rows, prompts = [row for row, _, _ in ended], [prompt for _, prompt, _ in ended]
        responses = [response for _, _, response in ended]
        longest = max((len(prompt) + len(each.tokens) for _, prompt, each in ended), default=1)
        fields = self._lay_out(rows, prompts, responses, longest)
        group = RowGroup(rows=torch.tensor(rows, dtype=torch.int64) + self._start, fields=fields, width=width)
        self._outlet.put(len(STREAM_SHARES) - 1 - len(self._sizes), group)


class RolloutWorker:
    """One rank of a generator (engine or external servers) with the weights of an actor in another pool."""

    def __init__(self, setting: WorkerSetting, *, max_sequences: int = 1, on_gpu: bool = False) -> None:
        """max_sequences: the most responses that this rank's engine writes at once; on_gpu: the servers are on GPUs."""
        tokenizer = setting.tokenizer()
        self._servers: Endpoints | None = None
        self._wrong_weights = ""
        """Text of the NumericsError that received weights have raised; empty if all were right."""
        self._weights: WeightReceiver | InterruptingReceiver | ServerWeights
        if setting.job.generates_elsewhere:
            config = inner(setting.language_model()).config
            self._servers = servers_of(setting, config, on_gpu=on_gpu)
            self._weights = ServerWeights(setting, self._servers, config)
            self.generation = Generation(setting, tokenizer, self._servers)
            return
        assert setting.layout is not None
        model = inner(generating_model(setting))
        engine, environments = start_engine(setting, tokenizer, model.config, setting.layout, max_sequences)
        self._weights = receiver = WeightReceiver(setting, engine, model.config)
        agree_on_width: Callable[[int], int] = largest_over_ranks
        if setting.job.spec.rollout.partial:
            self._weights = interrupting = InterruptingReceiver(receiver, engine)
            agree_on_width = interrupting.agree_on_width
        self.generation = Generation(
            setting, tokenizer, engine, environments, agree_on_width=agree_on_width, costs=RowCosts(model)
        )

    @classmethod
    def change_transfers(cls, marks: Marks, *, setting: WorkerSetting, **_: object) -> Marks:
        """Declare the fields of episodes and the experts of tokens, if the job has any."""
        return turn_transfers(marks, setting)

    @register(ONE_TO_ALL)
    def span_pools(self, *, span: Span) -> None:
        """Join the torch.distributed group of the actor's ranks and of all ranks that generate."""
        self._weights.span_pools(span)

    @register(ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Receive the weights that the actor sends, into this rank's engine or the external servers."""
        with self._remembering_wrong_weights():
            self._weights.receive()

    @register(ONE_TO_ALL)
    def found(self) -> list[tuple[str, int]]:
        """Return (machine, ranks) of servers to join, as `Endpoints.found` does; empty if this rank has an engine."""
        return self._servers.found() if self._servers else []

    @register(THREE_D_ALL_MICRO_DP, reads=PROMPT_FIELDS, adds=ROLLOUT_FIELDS, in_groups=True)
    def generate_sequences(self, batch: Batch, *, do_sample: bool = True, outlet: Outlet | None = None) -> Fields:
        """Generate as `GeneratingActor.generate_sequences` does; warn of servers that were lost.

        NumericsError if the last weights were wrong.
        """
        if self._wrong_weights:
            raise NumericsError(self._wrong_weights)
        with self._remembering_wrong_weights():  # with `rollout.partial` weights come in the middle of responses
            fields = self.generation.generate(batch, do_sample=do_sample, outlet=outlet)
        for path, sentence in self._servers.news().items() if self._servers and batch.step > 0 else ():
            recorder.warn(path, sentence)  # evaluations show no warnings
        return fields

    @contextmanager
    def _remembering_wrong_weights(self) -> Iterator[None]:
        """Refuse later calls of `generate_sequences` after a NumericsError in the `with` block."""
        try:
            yield
        except NumericsError as error:
            self._wrong_weights = str(error)
            raise

    def close(self) -> None:
        """End this rank's engine; external servers keep running."""
        self.generation.close()


def generating_model(setting: WorkerSetting) -> LanguageModel:
    """Return the model that generates, without memory for its weights yet; ConfigError if the job cannot use it."""
    job, model = setting.job.spec, setting.language_model()
    if job.training.compile and device_here().type == "cpu":  # vLLM runs there without torch.compile
        raise ConfigError("spec.training.compile: layers cannot be compiled where responses are generated on CPU")
    return model


def oldest_version(fields: Fields) -> Tensor:
    """Return the policy version [B] of the oldest token of each response; inf for a row without a response."""
    return fields["policy_version"].masked_fill(fields["response_mask"] == 0, torch.inf).amin(1)


def laid_out(prompts: Sequence[Ids], responses: Sequence[Response], *, width: int, pad_token: int) -> dict[str, Tensor]:
    """Return fields of each row's prompt and response, contiguous from position 0, padded on the right to `width`."""
    shape = (len(prompts), width)
    tokens = torch.full(shape, pad_token, dtype=torch.int64)
    attention_mask, response_mask = torch.zeros(shape), torch.zeros(shape)
    log_probs, versions = torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = len(prompt), len(prompt) + len(response.tokens)
        tokens[row, :end] = torch.tensor([*prompt, *response.tokens])
        attention_mask[row, :end] = 1.0
        response_mask[row, start:end] = torch.tensor(response.written).float() if response.written else 1.0
        log_probs[row, start:end] = torch.tensor(response.log_probs)
        versions[row, start:end] = torch.tensor(response.versions).float()
    return {
        "tokens": tokens,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "policy_version": versions,
        "finished": torch.tensor([float(response.finished) for response in responses]),
    }


def stack_experts(responses: Sequence[Response], *, width: int, size: int) -> Tensor:
    """Return the experts of each row's tokens, uint8 [rows, width, size]; 0 at a last token, which nothing has read."""
    found = torch.zeros(len(responses), width, size, dtype=torch.uint8)
    for row, response in enumerate(responses):
        if response.experts is not None:
            found[row, : len(response.experts)] = response.experts
    return found


def stack_parents(prompts: Sequence[Ids], responses: Sequence[Response], *, width: int) -> Tensor:
    """Return the `PARENTS` of each row, int64 [rows, width]; a token of a prompt follows the token before it."""
    found = torch.arange(-1, width - 1).repeat(len(prompts), 1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        found[row, len(prompt) : len(prompt) + len(response.tokens)] = torch.tensor(response.parents, dtype=torch.int64)
        found[row, len(prompt) + len(response.tokens) :] = -1
    return found
