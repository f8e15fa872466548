"""vLLM in this process: this rank's part of an engine that gets the actor's weights and a seed per response."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_api.spec.rollout import Rollout
from rlhf_trainer.collector import collector_off
from rlhf_trainer.errors import EnvironmentProblem, MemoryProblem, TrainerError
from rlhf_trainer.expert_rows import ExpertRows
from rlhf_trainer.generation.routed_experts import ReturnedExperts
from rlhf_trainer.generation.vllm_arguments import STAGE_LAYERS, engine_arguments, environment, sampling_arguments
from rlhf_trainer.generation.vllm_patches import (
    classes_inspected_here,
    drafts_loaded,
    groups_on,
    mend_drafts,
    modules_served,
    other_groups_kept,
)
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice

Part = Literal["weights", "kv_cache"]
"""Parts of the engine's memory that are freed and allocated separately, by vLLM's names."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """Response of vLLM's engine to one prompt."""

    tokens: Sequence[int]
    """Token ids of the response, with the end token if the response reached one."""
    log_probs: Sequence[float]
    """Log-probability of each token of the response under its sampling distribution."""
    finished: bool
    """Whether the response ended with an end token (False: cut at the length limit)."""
    versions: Sequence[int]
    """Policy version of the weights that wrote each token of the response."""
    experts: Tensor | None = None
    """Experts of all tokens of prompt and response but the last, uint8 [tokens, E] (`ExpertRows`); None: no replay."""
    written: Sequence[bool] = ()
    """True for each token of an episode that the model wrote, False for the environment's; empty: the model's only."""
    parents: Sequence[int] = ()
    """Index, in prompt and response, of each token's predecessor; -1: none. Empty: each follows the one before it."""


@dataclass(frozen=True)
class _Request:
    prompt: Sequence[int]
    sampling: Any
    versions: list[int]
    """Policy version of each token of the response that was written before the current weights came."""


def response_seed(seed: int, step: int, row: int, turn: int = 0) -> int:
    """Return the seed of one response, a function of (seed, step, row, turn) alone, not of ranks, pools or batches."""
    later = f"/{turn}" if turn else ""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}{later}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


class GenerationEngine:
    """vLLM with tensor and pipeline parallelism over ranks of torch.distributed, which must be initialised.

    All ranks of an engine are given the same prompts and seeds, and return the same responses.
    """

    def __init__(
        self,
        folder: str,
        *,
        config: PreTrainedConfig,
        rollout: Rollout,
        max_tokens: int,
        max_sequences: int,
        ends: list[int],
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool,
        revision: str | None,
        tensor_groups: Sequence[Sequence[int]],
        stage_layers: Sequence[int] = (),
        draft: str | None = None,
    ) -> None:
        """Build this rank's part of an engine, and free its cache and weights until needed; a collective of the world.

        folder: of the model's config (weights come with `load_weights`); max_tokens: of prompt and response;
        tensor_groups: every rank of the world once, the p_g stages of an engine one after the other; stage_layers: the
        layers of each of the p_g stages, or nothing for one; draft: local folder, or name on the hub, of the draft
        model, which keeps its files' weights. EnvironmentProblem without vLLM, or for an unknown layout.
        MemoryProblem when the cache does not fit. ConfigError for stages of unequal length on GPUs.
        With `rollout.routing: Replay` responses have their `experts`; EnvironmentProblem if vLLM returns none.
        """
        self._rollout, self._ends = rollout, ends
        self.is_first = torch.distributed.get_rank() in {ranks[0] for ranks in tensor_groups[:: len(stage_layers) or 1]}
        """True on the first rank of an engine, False on the engine's other ranks."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self._awake: set[Part] = {"weights", "kv_cache"}
        self._measured_bytes, self._cache_peak = 0, 0.0
        self._has_draft, self._drafts = draft is not None, (0, 0)
        self.version = -1
        """Policy version of the engine's weights, set by the caller that loads weights."""
        self.before_token: Callable[[], None] = lambda: None
        """Callback before each step of vLLM; it may load other weights."""
        self._requests, self._ended = dict[int, _Request](), list[tuple[int, Response]]()
        arguments = engine_arguments(
            config=config,
            rollout=rollout,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            on_gpu=self._on_gpu,
            dtype=dtype,
            shards=len(tensor_groups[0]),
            stage_layers=stage_layers,
            trust_remote_code=trust_remote_code,
            draft=draft,
        )
        self._vllm = _import_vllm(environment(rollout, on_gpu=self._on_gpu, stage_layers=stage_layers))
        arguments |= dict.fromkeys(("revision", "tokenizer_revision", "code_revision"), revision)
        served = modules_served(revision) if "model_impl" in arguments else nullcontext()
        field = "spec.rollout.gpuMemoryUtilization" if self._on_gpu else "spec.data.maxResponseTokens"
        with self._measured(), served, _start_of_vllm(tensor_groups, field), drafts_loaded():
            self._engine = self._vllm.LLM(folder, trust_remote_code=trust_remote_code, **arguments)
        self._prepare(len(stage_layers))
        self._experts = ReturnedExperts(ExpertRows.of(config)) if rollout.routing == "Replay" else None
        self._try_experts()
        self.sleep()

    def _prepare(self, stages: int) -> None:
        """Prepare the built engine, and check that its weights have the job's quantization; stages: of the pipeline."""
        if stages > 1:
            self._call("allocate_stage_input")
        self._call("require_quantized", self._rollout.quantization)
        self._watch_cache()

    def _try_experts(self) -> None:
        """Generate two tokens with random weights, which raises the error if vLLM returns no experts."""
        if self._experts is None:
            return
        if not self._on_gpu:
            scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
            self._experts.watch(scheduler, self._call("keep_experts", self._experts.rows))
        self.generate([self._ends[:1]], [0], max_tokens=2, greedy=True)

    def held_shards(self) -> dict[str, TensorSlice]:
        """Return the slice that this rank holds of each Hugging Face parameter, in the order of the model."""
        held: dict[str, TensorSlice] = self._call("held_shards")
        return held

    def load_weights(self, pieces: Iterable[WeightSlice], holds: Mapping[str, TensorSlice]) -> dict[str, Tensor]:
        """Wake the weights, replace them by `update_live_weights`, and drop cached prefixes; the KV cache is kept."""
        self._end_steps()
        self._wake("weights")
        with torch.random.fork_rng():
            sums: dict[str, Tensor] = self._call("update_live_weights", pieces, holds)
        self._engine.reset_prefix_cache()
        return sums

    def wake_cache(self) -> None:
        """Allocate the KV cache; called last before `generate`, when the trained model may have left the device."""
        self._wake("kv_cache")

    def sleep(self) -> int:
        """Free the KV cache and the weights until the next `load_weights`; returns the number of freed bytes."""
        before = self.bytes_held()
        with self._measured():
            if self._awake and self._on_gpu:
                if self._has_draft:
                    self._call("keep_draft")
                self._engine.sleep(level=2)
            for part in () if self._on_gpu else self._awake:
                self._call("free_part", part)
        self._awake.clear()
        return before - self.bytes_held()

    def bytes_held(self) -> int:
        """Return the bytes of this rank's device that the engine holds.

        On CPU these are its weights and cache. On a GPU they are counted by the driver during the construction and each
        sleep and wake, so CUDA graphs and NCCL's buffers, which stay during sleep, count too.
        """
        return self._measured_bytes if self._on_gpu else self._call("bytes_held")

    def cache_peak(self) -> float:
        """Return the largest share of the KV cache in use since the last call."""
        peak, self._cache_peak = self._cache_peak, 0.0
        return peak

    def drafts(self) -> tuple[int, int]:
        """Return (accepted, drafted) tokens of speculative decoding since the last call."""
        drafts, self._drafts = self._drafts, (0, 0)
        return drafts

    def _watch_drafts(self, scheduler: Any) -> None:
        if self._rollout.speculation is None:
            return
        if not self._on_gpu:
            mend_drafts()
        self._call("draft_row_by_row")
        count = scheduler.make_spec_decoding_stats

        def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *others: Any, **named: Any) -> Any:
            self._drafts = (self._drafts[0] + num_accepted_tokens, self._drafts[1] + num_draft_tokens)
            return count(stats, num_draft_tokens, num_accepted_tokens, *others, **named)

        scheduler.make_spec_decoding_stats = counted

    def _watch_cache(self) -> None:
        scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*arguments: Any, **options: Any) -> Any:
            planned = schedule(*arguments, **options)
            self._cache_peak = max(self._cache_peak, scheduler.kv_cache_manager.usage)
            return planned

        scheduler.schedule = watched
        self._watch_drafts(scheduler)

    def close(self) -> None:
        """End vLLM's engine, so that another engine can start in this process."""
        with other_groups_kept():
            self._engine.llm_engine.engine_core.shutdown()

    def _wake(self, part: Part) -> None:
        if part in self._awake:
            return
        with self._measured():
            if self._on_gpu:
                self._engine.wake_up(tags=[part])
                if part == "weights" and self._has_draft:
                    self._call("restore_draft")
            else:
                self._call("allocate_part", part)
        self._awake.add(part)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        before = bytes_used(self._device)
        yield
        self._measured_bytes += bytes_used(self._device) - before

    def _call(self, method: str, *arguments: Any) -> Any:
        (result,) = self._engine.collective_rpc(method, args=arguments)
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        greedy: bool = False,
        ended: Callable[[int, Response], None] = lambda *_: None,
    ) -> list[Response]:
        """Generate a response to each prompt, in order; ended: called with each (prompt's index, response)."""
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self.begin(number, prompt, seed, max_tokens=max_tokens, greedy=greedy)
        found: dict[int, Response] = {}
        while self.is_busy:
            for number, response in self.step():
                found[number] = response
                ended(number, response)
        return [found[number] for number in range(len(prompts))]

    def begin(
        self, number: int, prompt: Sequence[int], seed: int, *, max_tokens: int, greedy: bool, stop: Sequence[str] = ()
    ) -> None:
        """Begin a response to a prompt, besides those being generated; `step` returns it with `number`.

        stop: further texts that end the response; the response's last token completes the text.
        """
        if self._awake != {"weights", "kv_cache"}:
            raise TrainerError("the generator sleeps; load_weights and then wake_cache wake it")
        rollout, ends = self._rollout, self._ends
        arguments = sampling_arguments(rollout, ends=ends, seed=seed, max_tokens=max_tokens, greedy=greedy)
        stopping = {"stop": list(stop), "detokenize": True} if stop else {}
        sampling = self._vllm.SamplingParams(**arguments | stopping)
        sampling.output_kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self._add(number, _Request(prompt, sampling, []))

    def abort(self, number: int) -> None:
        """End a response that was begun; `step` does not return it, unless it has ended already."""
        if self._requests.pop(number, None):
            self._engine.llm_engine.abort_request([str(number)])

    def _add(self, number: int, request: _Request) -> None:
        self._requests[number] = request
        self._engine.llm_engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, request.sampling)

    def step(self) -> list[tuple[int, Response]]:
        """Let vLLM generate a token of each running response; return (number, response) of each that has ended."""
        self.before_token()
        ended, self._ended = self._ended, []
        return [*ended, *self._step()] if self.is_busy else ended

    def _step(self) -> list[tuple[int, Response]]:
        with torch.random.fork_rng():
            outputs = self._engine.llm_engine.step()
        ended = [(int(output.request_id), output.outputs[0]) for output in outputs if output.finished]
        return [(number, self._response(number, output, self._requests.pop(number))) for number, output in ended]

    def _end_steps(self) -> None:
        """Finish the steps that vLLM has begun, in pipeline stages or ahead of time; `step` returns their responses."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._engine.llm_engine.engine_core.engine_core
        if not core.batch_queue or "kv_cache" not in self._awake:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._ended += self._step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def weights_replaced(self, older: int) -> int:
        """Continue the current responses with new weights; returns their number. older: version of the old weights.

        Their KV cache is recomputed, so each further token is drawn as if the new weights had been there all along.
        With `rollout.partial: Restart` the responses begin again.
        """
        engine, under_way = self._engine.llm_engine, dict(self._requests)
        restarts = self._rollout.partial == "Restart"
        if restarts:
            engine.abort_request([str(number) for number in under_way])
        for state in engine.output_processor.request_states.values():
            versions = under_way[int(state.external_req_id)].versions
            versions += [older] * (state.detokenizer.num_output_tokens() - len(versions))
        self._engine.reset_prefix_cache(reset_running_requests=True)
        for number, request in under_way.items() if restarts else ():
            self._add(number, request)
        return len(under_way)

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.llm_engine.has_unfinished_requests())

    def agreed(self, value: Any) -> Any:
        """Broadcast a value from the first rank of the engine to all its ranks; a collective of the engine."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        for group in (get_pp_group(), get_tp_group()):
            value = group.broadcast_object(value) if group.world_size > 1 else value
        return value

    def _response(self, number: int, output: Any, request: _Request) -> Response:
        tokens = list(output.token_ids)
        versions = [*request.versions, *[self.version] * (len(tokens) - len(request.versions))]
        log_probs = [chosen[token].logprob for token, chosen in zip(tokens, output.logprobs, strict=True)]
        inputs = len(request.prompt) + len(tokens) - 1
        experts = self._experts.take(str(number), output, tokens=inputs) if self._experts else None
        ends = tokens[-1] in self._ends
        return Response(tokens=tokens, log_probs=log_probs, finished=ends, versions=versions, experts=experts)


def bytes_used(device: torch.device) -> int:
    """Count a GPU's used bytes, without torch's unused cache; 0 on CPU, where `bytes_held` counts weights and cache."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _import_vllm(variables: Mapping[str, str]) -> Any:
    """Set environment variables, and import vLLM, which takes seconds and only the actor of an RL job needs."""
    os.environ.pop(STAGE_LAYERS, None)  # set for an earlier engine of this process
    os.environ.update(variables)
    try:
        with collector_off():
            import vllm

        torch.cpu._init_amx()  # noqa: SLF001 vLLM's kernels use AMX, for which a process must ask Linux
    except ImportError as error:
        raise EnvironmentProblem(f"vLLM cannot be imported: {error}") from error
    return vllm


@contextmanager
def _start_of_vllm(tensor_groups: Sequence[Sequence[int]], field: str) -> Iterator[None]:
    """Start vLLM in the block, with its groups on these ranks, and check its layout; MemoryProblem names `field`."""
    try:
        with collector_off():
            from rlhf_trainer.generation.self_check import layout_checked  # it imports most of vLLM

        with torch.random.fork_rng(), groups_on(tensor_groups), layout_checked(), classes_inspected_here():
            yield
    except (MemoryError, RuntimeError, ValueError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        reason = " ".join(str(error).split())[:300]
        raise MemoryProblem(f"{field}: vLLM's cache does not fit: {reason}") from error
