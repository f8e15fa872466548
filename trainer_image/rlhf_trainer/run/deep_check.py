"""Trial of what jobs need, before any of them trains: models, data, the user's functions, and room on the disk."""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from rlhf_api.chain import SCHEME, merged_models
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithms import Distilling
from rlhf_api.spec.merging import Merging
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.architecture import positions_of
from rlhf_mapper.config_file import SCORERS, made_from
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_mapper.place import place, sizes_in, wrong_sizes
from rlhf_planning.checkpoint_size import bytes_at_once, bytes_of_saving, checkpoint_bytes
from rlhf_planning.numbers import size_text
from rlhf_trainer.data.loaders import Loader
from rlhf_trainer.environments.of_job import try_environment
from rlhf_trainer.errors import ConfigError, DataError, EnvironmentProblem, TrainerError
from rlhf_trainer.expert_rows import expert_count
from rlhf_trainer.generation.families import must_quantize, why_no_draft, why_not_generated
from rlhf_trainer.outputs.opening import require_trackers
from rlhf_trainer.rewards.sample import Sample
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.job_run import require_measure
from rlhf_trainer.run.machine import gpu_count
from rlhf_trainer.run.preconditions import is_written, other_vocabularies, require_mixtures, require_possible
from rlhf_trainer.run.resume import identities
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run_folder.folder import JobFolder, found_model, model_folders, with_written_data
from rlhf_trainer.training.attention import use_attention
from rlhf_trainer.training.batching import RowCosts
from rlhf_trainer.training.kernels import why_plain
from rlhf_trainer.training.loading import has_weights, load_config, load_tokenizer, try_config, unread_tensors
from rlhf_trainer.training.merging import require_alike
from rlhf_trainer.training.models import LanguageModel, Scorer, inner
from rlhf_trainer.training.optimizer import learning_rate
from rlhf_trainer.training.saving import try_saving
from rlhf_trainer.training.sharding import layers_of
from rlhf_trainer.workers.base import WorkerSetting
from rlhf_trainer.workers.data import DataWorker
from rlhf_trainer.workers.retokenized import Retokenized, prompt_of, with_prompts
from rlhf_trainer.workers.scoring import UserCode, evaluation_code, reward_code, terms_of
from rlhf_trainer.workers.teacher import try_teachers
from rlhf_trainer.workers.trials import made_samples, total_of, try_score, with_first_rows
from rlhf_trainer.workers.weight_links import servers_of

P = ParamSpec("P")
T = TypeVar("T")
FIRST_ROWS, TRIED_ROWS = 64, 2
"""Number of a data set's first rows that go through tokenizer and chat template, and of those that rewards score."""
RESPONSE = "This is a response."


def problems(pending: Sequence[Job], jobs: Sequence[Job], output: Path) -> Iterator[tuple[Job, TrainerError]]:
    """Yield (job, error) for each error that would end a job of `pending`; jobs: all jobs of the manifest.

    Models of this machine are read; a model that an earlier job makes is checked by the config.json of its origin.
    First rows go through tokenizer and template, and each function, service and judge is called once on one of them.
    """
    by_name = {job.name: job for job in jobs}
    for job in pending:
        yield from ((job, error) for error in JobCheck(job, by_name, output).problems())
    yield from _without_room(pending, jobs, output)


class JobCheck:
    """Check of one job before it runs: its models, data sets, functions, services and step."""

    def __init__(self, job: Job, jobs: Mapping[str, Job], output: Path, *, elsewhere: bool = False) -> None:
        """Make the check; elsewhere: whether the job is to run on other machines, which may have GPUs."""
        self._job, self._jobs, self._output, self._elsewhere = job, jobs, output, elsewhere
        self._found: list[TrainerError] = []

    def problems(self) -> list[TrainerError]:
        """Run all checks and return the errors, without duplicates."""
        if isinstance(self._job.spec.algorithm, Merging):
            self._tried(self._try_merge)
            return self._found
        for role in self._job.models():
            self._tried(self._try_model, role)
            self._tried(self._try_sizes, role)
        retokenized, readers = set[Role](), list[WorkerSetting]()
        if not self._found:
            folders = {role: self._origin(role).folder for role in self._job.models()}
            found = self._tried(other_vocabularies, self._job, self._job.models(), folders)
            if found is not None:
                retokenized, readers = found, list(map(self._origin, sorted(self._job.models().keys() - found)))
        self._job = with_prompts(self._job) if retokenized else self._job
        if not self._found:
            self._tried(self._try_draft)
        if self._job.generates_elsewhere and not self._found:
            self._try_endpoints()
        if isinstance(self._job.spec.algorithm, Distilling) and not self._found:
            self._tried(try_teachers, self._origin("actor"))
        for check in (self._try_places, self._try_step, self._try_schedules, self._try_measure):
            self._tried(check)
        data = self._tried(self._data, readers)
        self._tried(self._try_limits, readers, data.loaders if data else ())
        if data:
            self._tried(partial(data.train.batch, 1, batch_size=1))  # calls the user's `spec.data.order`
            self._tried(self._try_tokens, retokenized, data)
            self._tried(self._try_code, data)
        self._tried(require_trackers, self._job, self._output)
        return list({str(error): error for error in self._found}.values())

    def _tried(self, check: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
        """Run a check and return its result; None after its error, which is added to the errors found."""
        try:
            return check(*arguments, **options)
        except TrainerError as error:
            self._found.append(error)
        except SpecError as error:
            self._found.append(ConfigError(str(error)))
        return None

    def _try_sizes(self, role: Role) -> None:
        """Check the parallel sizes that the manifest gives a model, as a run checks the sizes of its placement."""
        setting, sizes = self._origin(role), sizes_in(self._job)
        roles = (role, "rollout") if role == "actor" else (role,)
        with setting.naming():
            own = {each: sizes[each] for each in roles if each in sizes}
            require_possible(self._job, own, {role: (setting.model, setting.folder)})

    def _try_draft(self) -> None:
        """Check that the draft model fits the actor: its family, its tokenizer and its weights."""
        uri = self._job.spec.rollout.speculation.draft if self._job.spec.rollout.speculation else None
        if not uri:
            return
        path = f"{self._job.name}: spec.rollout.speculation.draft"
        draft = found_model(path, uri, self._output)
        actor, data = self._origin("actor"), self._job.spec.data
        remote = actor.model.trust_remote_code
        config = load_config(draft, trust_remote_code=remote, revision=None)
        own = load_tokenizer(draft, trust_remote_code=remote, revision=None).get_vocab()
        tokens = data.max_prompt_tokens + data.max_response_tokens
        if reason := why_no_draft(config, actor.config(), tokens=tokens, on_cpu=self._on_cpu):
            raise ConfigError(f"{path}: {uri} {reason}")
        if own != (actors := actor.tokenizer().get_vocab()):
            raise ConfigError(f"{path}: the tokenizer of {uri} is not the actor's ({len(own)}, {len(actors)} entries)")
        if not has_weights(draft):
            raise DataError(f"{path}: {uri} has no weights (*.safetensors)")

    def _try_model(self, role: Role) -> None:
        """Build the model of a role on the meta device; check that the job can generate with it, train and save it."""
        setting, is_made = origin_of(self._job, role, self._jobs, self._output)
        remote, revision, scores = setting.model.trust_remote_code, setting.model.revision, role in SCORERS
        trains, is_sft = role in self._job.trained(), self._job.spec.algorithm.data == "completions"
        with setting.naming():
            if role == "actor" and not self._job.spec.algorithm.offline:
                config, cpu, apart = setting.config(), self._on_cpu, self._job.generates_elsewhere
                if reason := why_not_generated(config, on_cpu=cpu, elsewhere=apart, trust_remote_code=remote):
                    raise ConfigError(reason)
                must_quantize(self._job.spec.rollout, config, on_cpu=cpu, elsewhere=self._elsewhere)
                setting.must_replay_routing()
            if is_made:  # the check of the job that makes the model does the rest
                setting.adapt(try_config(setting.folder, scores=scores, trust_remote_code=remote, revision=revision))
                return
            model: LanguageModel | Scorer = (
                setting.scorer(may_add_head=trains) if scores else setting.language_model(may_initialise=is_sft)
            )
            use_attention(inner(model), "SDPA", device=torch.device("cpu"), dtype=torch.float32)
            layers_of(model)
            RowCosts(inner(model))
            if trains:
                require_mixtures(self._job, {role: expert_count(inner(model).config)})
                try_saving(model, setting.tokenizer(), trust_remote_code=remote)
        place = f"{setting.path}: {setting.folder}"
        if not has_weights(setting.folder):
            sys.stderr.write(f"{place} has no weights; training begins with random ones\n")
        may_fuse = not (self._on_cpu or self._job.spec.training.kernels == "Plain" or self._job.spec.training.compile)
        if may_fuse and (reason := why_plain(inner(model).config, is_elsewhere=self._elsewhere)):
            sys.stderr.write(f"{place}: its layers have plain kernels on GPUs: {reason}\n")
        if unread := unread_tensors(inner(model), model.weights or ()):
            sys.stderr.write(f"{place}: {len(unread)} tensors are not read, and not saved: {', '.join(unread[:4])}\n")

    def _try_merge(self) -> None:
        """Compare the models to merge with the first one; for a model that another job makes, compare its origin."""
        folders = dict[str, tuple[str, bool]]()
        for field, uri in merged_models(self._job).items():
            path, maker = f"{self._job.name}: spec.{field}", self._jobs.get(uri.removeprefix(SCHEME))
            origin = origin_of(maker, maker.saved, self._jobs, self._output)[0].folder if maker else ""
            folders[path] = origin or found_model(path, uri, self._output), maker is not None
        require_alike(folders, by_ot=getattr(self._job.spec.algorithm, "method", "") == "OT")

    def _try_endpoints(self) -> None:
        """Compare the external servers' models with the actor, and have each server generate two tokens."""
        setting = self._origin("actor")
        may_be_elsewhere = self._job.spec.resources.device == "Auto" and self._on_cpu
        on_gpu = None if may_be_elsewhere else not self._on_cpu
        self._found += servers_of(setting, setting.config(), on_gpu=on_gpu).problems()

    @property
    def _on_cpu(self) -> bool:
        device = self._job.spec.resources.device
        return device == "CPU" or (device == "Auto" and not self._elsewhere and not gpu_count())

    def _try_places(self) -> None:
        """Place the models on the slots that the manifest names, which raises the errors of sizes and batches."""
        names_slots = self._job.spec.resources.slots_per_node or self._job.spec.placement.mode == "Manual"
        if names_slots and not self._elsewhere:  # an operator may take fewer slots
            place(self._job, (sys.maxsize,))
        with suppress(TrainerError):  # the shape of a model is unknown; a run does not map such a model either
            shapes = shapes_of([*self._jobs.values()], self._job, self._output)
            if found := [each for role in shapes for each in wrong_sizes(self._job, role, shapes[role])]:
                raise SpecError(found)

    def _try_step(self) -> None:
        """Record the step of a user's own algorithm, which raises the errors of its calls."""
        if not self._job.spec.algorithm.is_own:
            return
        pool = MappedPool(name="one", models=self._job.placed_roles(), slots_per_machine=(1,))
        sizes = dict.fromkeys(pool.models, ParallelSizes(data=1))
        graph_of(self._job, DeviceMapping(device="CPU", pools=(pool,), sizes=sizes))

    def _try_schedules(self) -> None:
        """Compute each trained model's learning rate at the first step, which raises the errors of a schedule."""
        for role, model in self._job.models().items():
            if model.optimizer:
                path = f"{self._job.name}: spec.models.{self._job.spec.models.field(role)}"
                learning_rate(model.optimizer, 1, total_steps=self._job.spec.training.total_steps or 1, path=path)

    def _try_measure(self) -> None:
        """Check that the evaluation will measure what `checkpoint.keepBest` names."""
        wanted = self._job.spec.checkpoint.keep_best
        if wanted and self._job.spec.evaluation and not self._job.is_measured(wanted):
            require_measure(self._job, self._job.measures)

    def _origin(self, role: Role) -> WorkerSetting:
        return origin_of(self._job, role, self._jobs, self._output)[0]

    def _try_tokens(self, retokenized: set[Role], data: DataWorker) -> None:
        """Try each tokenizer that is not the actor's on a sample row, which raises the errors of the encoding."""
        if not retokenized:
            return
        actor = self._origin("actor")
        loaders = [data.train, *([data.held_out] if self._job.spec.evaluation else [])]
        for role in sorted(retokenized):
            other = Retokenized(replace(self._origin(role), actor=(actor.model, actor.folder)))
            for sample in (data.sample(loader, 0, RESPONSE) for loader in loaders):
                other.encoded([prompt_of(self._job.spec, sample.columns)], [sample.response], [True])

    def _data(self, readers: Sequence[WorkerSetting]) -> DataWorker | None:
        """Load the first rows of every data set, or all rows if none of the first can be trained on.

        All rows are loaded, too, if one may have a token or a length that a model among `readers` cannot read.
        Returns None if an earlier job has still to write one of the data sets, or to write it again.
        """
        if not is_written(self._job, self._output, identities([*self._jobs.values()], self._output)):
            return None
        whole = with_written_data(self._job, self._output)
        setting = replace(self._origin(self._job.saved), job=whole)
        data = whole.spec.data
        tokens, longest = len(setting.tokenizer()), data.max_prompt_tokens + data.max_response_tokens
        if any(tokens > size or longest > most for size, most in map(_limits_of, readers)):
            return DataWorker(setting, slots=1)
        return with_first_rows(setting, FIRST_ROWS)

    def _try_limits(self, readers: Sequence[WorkerSetting], loaders: Sequence[Loader]) -> None:
        """Find the errors of models among `readers` for tokens that they lack, and for texts longer than they read."""
        whole = self._job.spec.data.max_prompt_tokens + self._job.spec.data.max_response_tokens
        static = {} if self._job.spec.algorithm.offline else {"spec.data": (0, whole)}
        rows = static | {loader.path: loader.largest for loader in loaders}
        for setting, (path, (token, tokens)) in product(readers, rows.items()):
            size, most = _limits_of(setting)
            if token >= size:
                text = setting.tokenizer().convert_ids_to_tokens(token)
                told = f"needs the token {text!r} ({token}), but the vocabulary of {setting.folder} ends at {size - 1}"
                remedy = "resize the model's embedding to the tokenizer"
                self._found.append(DataError(f"{self._job.name}: {path}: {told}; {remedy}"))
            if tokens > most:
                what = "maxPromptTokens + maxResponseTokens" if path in static else "the length of its longest row"
                told = f"{what} is {tokens}; the model {setting.folder} reads {most} tokens at most"
                self._found.append(ConfigError(f"{self._job.name}: {path}: {told}"))

    def _try_code(self, data: DataWorker) -> None:
        """Call the job's environment, functions, services and judges on the first row of each data set they score."""
        if self._job.spec.algorithm.data != "prompts":
            return
        first = data.sample(data.train, 0, RESPONSE)
        held_out = [data.sample(data.held_out, 0, RESPONSE)] if self._job.spec.evaluation else []
        if self._job.spec.rollout.agent:
            has_own_image = self._job.spec.sandbox and self._job.spec.sandbox.image
            self._tried(try_environment, self._job, {} if has_own_image else {"check": None})
        if self._job.spec.rollout.environment:
            calls = {"reset": {"prompt": first.prompt, **first.columns}, "step": RESPONSE}
            self._tried(try_environment, self._job, calls)
        self._try_rewards([first, *held_out], data)
        for judge in evaluation_code(self._job, ranks=1).values():
            self._tried(_call, judge, held_out)

    def _try_rewards(self, samples: Sequence[Sample], data: DataWorker) -> None:
        """Score `samples` and the responses that `rlhf reward` makes up; warn if no right answer beats an empty one."""
        tried, terms = made_samples(self._job, data, TRIED_ROWS), terms_of(self._job)
        everything, scores = [*(sample for *_, sample in tried), *samples], dict[str, Sequence[float | None]]()
        for path, code in reward_code(self._job, ranks=1).items():
            scores[path] = self._tried(_call, code, everything) or [None] * len(everything)
        empty, right = list[float](), list[float]()
        for number, (_, kind, _) in enumerate(tried):
            total = total_of(terms, {path: found[number] for path, found in scores.items()})
            (empty if kind == "empty" else right).extend([] if total is None else [total])
        if empty and right and max(right) <= min(empty):
            told = f"right answers get no more than empty responses on the first {TRIED_ROWS} rows; see `rlhf reward`"
            sys.stderr.write(f"{self._job.name}: spec.models.reward: {told}\n")


def origin_of(job: Job, role: Role, jobs: Mapping[str, Job], output: Path) -> tuple[WorkerSetting, bool]:
    """Return (worker setting of a role's model or its origin, whether another job makes the model from the origin)."""
    maker, made = made_from(job, role, jobs)
    source, folder = maker.models()[made], model_folders(maker, output)[made]
    model = source.model_copy(update={"lora": job.models()[role].lora})
    return WorkerSetting(job=job, role=role, model=model, folder=folder, total_steps=1), maker is not job


def _limits_of(setting: WorkerSetting) -> tuple[int, int]:
    """Return (size of a model's vocabulary, most tokens that it reads); scaled rotary embeddings raise the second."""
    config = setting.config()
    return config.get_text_config().vocab_size, positions_of(config.to_dict()) or sys.maxsize


def _call(code: UserCode, samples: Sequence[Sample]) -> list[float | None]:
    """Return the score of each sample; a judge may compare the sample with the others of its prompt."""
    numbered = [replace(sample, row=number) for number, sample in enumerate(samples)]
    with closing(code):
        code.ready()
        return [try_score(code, each, numbered) for each in numbered]


def _without_room(pending: Sequence[Job], jobs: Sequence[Job], output: Path) -> Iterator[tuple[Job, TrainerError]]:
    """Yield an error for the first job whose checkpoints and model do not fit on a disk after the earlier jobs."""
    kept: Counter[int] = Counter()
    """Bytes that the earlier jobs leave on each disk."""
    for job in pending:
        needed: Counter[int] = Counter()
        leaves: Counter[int] = Counter()
        for folder, most, left in _sizes(job, jobs, output):
            disk = folder.stat().st_dev
            needed[disk], leaves[disk] = needed[disk] + most, leaves[disk] + left
            free = max(0, shutil.disk_usage(folder).free - kept[disk])
            if needed[disk] > free:
                what = f"checkpoints and model take {size_text(needed[disk])}, but {folder} has {size_text(free)} free"
                yield job, EnvironmentProblem(f"{job.name}: spec.checkpoint: {what}")
                return
        kept += leaves


def _sizes(job: Job, jobs: Sequence[Job], output: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (local folder, most bytes that the job still needs there, bytes that it leaves there)."""
    folder = JobFolder(output, job)
    store = folder.checkpoints
    try:
        shapes = shapes_of(jobs, job, output)
    except TrainerError:
        return  # the check of the model itself says why its shape is unknown
    model = bytes_of_saving(job, shapes)
    yield _existing(folder.path), model, model // 2
    if "://" not in store.uri:
        there = sum(checkpoint.bytes for checkpoint in store.all())
        last = job.spec.checkpoint.kept * checkpoint_bytes(job, shapes)
        yield _existing(Path(store.uri)), bytes_at_once(job, shapes) - there, last - there


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())
