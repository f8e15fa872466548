"""Order of the jobs of a manifest: a job may read the output (`job://`) of another, or of a finished one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic.alias_generators import to_camel

from rlhf_api.checks.resume import leaves
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError, choice, suggestion
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_api.spec.algorithms import CUSTOM, Writing
from rlhf_api.spec.data import Rows
from rlhf_api.spec.merging import Merging
from rlhf_api.status import ReadInput

SCHEME = "job://"
ACTORS = tuple(name for name, each in ALGORITHMS.items() if "actor" in each.trained or issubclass(each, Merging))
"""Names of the algorithms whose output is a language model."""
ADDRESSES = ("uri", "initial", "draft", "base")
"""Fields of a spec whose value is the URI of a model, an adapter or a data set."""
WRITERS = tuple(name for name, each in ALGORITHMS.items() if each.makes == "data")
"""Names of the algorithms whose output is a data set."""
PAIR_KEYS = ("chosen_key", "rejected_key")
KEYS = {
    "completions": ("response_key",),
    "labelled_completions": ("response_key", "label_key"),
    "pairs": PAIR_KEYS,
    "safety_pairs": (*PAIR_KEYS, "chosen_safe_key", "rejected_safe_key"),
}
"""Fields of a data set that name the columns of its responses and labels, by the kind of its rows."""


def in_order(jobs: Sequence[Job], finished: Mapping[str, str]) -> list[Job]:
    """Return the jobs sorted: each after the jobs whose output it reads, else in the given order. Raises SpecError.

    finished: jobs of earlier runs whose output may be read too, name -> algorithm.
    """
    counts = Counter(job.name for job in jobs).items()
    if problems := [Problem(f"{name}: metadata.name", f"is used by {n} documents") for name, n in counts if n > 1]:
        raise SpecError(problems)
    by_name = {job.name: job for job in jobs}
    kinds = {**finished, **{name: job.spec.algorithm.name for name, job in by_name.items()}}
    if problems := [each for job in jobs for each in (*_wrong_inputs(job, kinds), *_unwritten_columns(job, by_name))]:
        raise SpecError(problems)
    ordered: list[Job] = []
    waiting = {job.name: job for job in jobs}
    while waiting:
        ready = next((job for job in waiting.values() if not inputs_of(job) & waiting.keys()), None)
        if ready is None:
            raise SpecError([_cycle(waiting)])
        ordered.append(waiting.pop(ready.name))
    return ordered


def _references(job: Job) -> dict[Role, str]:
    given = job.spec.models.by_role().items()
    return {role: model.uri.removeprefix(SCHEME) for role, model in given if model.uri.startswith(SCHEME)}


def merged_models(job: Job, scheme: str = "") -> dict[str, str]:
    """Return field of the spec -> URI of each model that a job merges, if the URI begins with `scheme`."""
    merged = job.spec.algorithm.addresses() if isinstance(job.spec.algorithm, Merging) else {}
    return {field: uri for field, uri in merged.items() if uri.startswith(scheme)}


def inputs_of(job: Job) -> set[str]:
    """Return the names of the jobs whose output a job reads."""
    merged = (uri.removeprefix(SCHEME) for uri in merged_models(job, SCHEME).values())
    return {*_references(job).values(), *merged, *data_from_jobs(job).values()}


def read_inputs(job: Job) -> tuple[ReadInput, ...]:
    """Return the models and data sets that a job's manifest names, with the manifest's URIs and without digests."""
    values = dict(leaves(job.spec.model_dump(mode="json", by_alias=True, exclude={"outputs"})))
    found = []
    for path, value in values.items():
        above, _, field = path.rpartition(".")
        if field in ADDRESSES and isinstance(value, str) and "://" in value:
            made_by = value.removeprefix(SCHEME) if value.startswith(SCHEME) else None
            name, revision = above if field == "uri" else path, values.get(f"{above}.revision")
            found.append(ReadInput(name=name, uri=value, job=made_by, revision=revision))
    return tuple(found)


def data_from_jobs(job: Job) -> dict[str, str]:
    """Return field of the spec -> job name, for the data sets with a job:// URI; the named job writes the data set."""
    return {field: source.address.removeprefix(SCHEME) for field, source in _sources_from_jobs(job).items()}


def _sources_from_jobs(job: Job) -> dict[str, Rows]:
    spec = job.spec
    read = {"spec.data.train": spec.data.train, "spec.data.pretrain": spec.data.pretrain}
    sources = [each for field, data in read.items() if data for each in data.sources(field).items()]
    sources += spec.evaluation.data.sources("spec.evaluation.data").items() if spec.evaluation else ()
    return {field: source for field, source in sources if source.address.startswith(SCHEME)}


def _wrong_inputs(job: Job, kinds: Mapping[str, str]) -> Iterator[Problem]:
    trained = job.spec.algorithm.trained
    read = [
        (f"spec.models.{job.spec.models.field(role)}.uri", name, _suitable(role, trained=role in trained))
        for role, name in _references(job).items()
    ]
    read += [(f"spec.{field}", uri.removeprefix(SCHEME), ACTORS) for field, uri in merged_models(job, SCHEME).items()]
    read += [(f"{field}.uri", name, WRITERS) for field, name in data_from_jobs(job).items()]
    for field, name, suitable in read:
        path = f"{job.name}: {field}"
        if name == job.name:
            yield Problem(path, "refers to its own job")
        elif name not in kinds:
            others = suggestion(name, kinds.keys() - {job.name})
            yield Problem(path, f'no job of this file, or finished in the run folder, is named "{name}"; {others}')
        elif (kind := kinds[name]) not in (*suitable, CUSTOM):  # the reader checks the output of a user's algorithm
            yield Problem(path, f'"{name}" is a job of {kind}, expected {choice(suitable)}')


def _unwritten_columns(job: Job, jobs: Mapping[str, Job]) -> Iterator[Problem]:
    """Yield a problem for each column that a job reads, but a job of the same file does not write (`Writing`)."""
    for field, source in _sources_from_jobs(job).items():
        writer = jobs.get(source.address.removeprefix(SCHEME))
        if writer is None or not isinstance(options := writer.spec.algorithm, Writing):
            continue
        data = writer.spec.data.train
        tools = {each.tools_key for each in data.sources("").values() if each.tools_key}
        written = {*options.own_columns, *writer.spec.columns(data), *tools}
        kind = "completions" if field == "spec.data.pretrain" else job.spec.algorithm.data
        prompt = "messages_key" if source.messages_key else "prompt_key"
        is_talk = prompt == "messages_key" and "completions" in kind
        for key in (prompt, *(() if is_talk else KEYS.get(kind, ()))):
            if (column := getattr(source, key)) not in written:
                what = f'"{writer.name}" with rows: {options.rows} writes no column "{column}"'
                yield Problem(f"{job.name}: {field}.{to_camel(key)}", f"{what}, expected {choice(sorted(written))}")


def _suitable(role: Role, *, trained: bool) -> tuple[str, ...]:
    """Return the algorithms whose output a model of `role` may load; a scorer to be trained may also load SFT's."""
    if role in ("actor", "reference", "teacher"):
        return ACTORS
    scorers = ("CostModel",) if role == "cost" else ("RewardModel",)
    return (*scorers, "SFT") if trained else scorers


def _cycle(waiting: dict[str, Job]) -> Problem:
    seen = [next(iter(waiting))]
    while seen.count(seen[-1]) == 1:
        seen.append(next(name for name in waiting if name in inputs_of(waiting[seen[-1]])))
    cycle = seen[seen.index(seen[-1]) :]
    return Problem(f"{cycle[0]}: spec", f"jobs wait for each other: {' -> '.join(cycle)}")
