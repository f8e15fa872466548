"""Versions of an actor's weights in a folder or object store, for any number of readers (DCT, arXiv 2010.08899).

A version is a folder whose file COMPLETE is written last, as in a checkpoint, so no reader takes an unfinished one.
A file holds a rank's pieces: tensors in a full version, which also has config and tokenizer, else messages of `delta`
against the base version. `state.json` has the ids of both (with checksums of weights), file checksums, and the job.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_api.files import document_of
from rlhf_api.job import Job
from rlhf_trainer.checkpoint import PREFIX, STATE, Checkpoint, CheckpointStore, UploadFolder
from rlhf_trainer.errors import EnvironmentProblem, NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.delta import decode, encoded
from rlhf_trainer.storage import open_storage, storage_errors
from rlhf_trainer.stored_tensors import (
    HeldTensor,
    LocalFile,
    places_in,
    saved_by_ranks,
    write_piece,
    write_tensors,
    written_type,
)
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.saving import CONFIG_FOLDER, saved_tensors
from rlhf_trainer.training.sharding import ShardedModel, pieces_to_save

FULL_EVERY = 10
"""Number of versions from a full one to the next; a reader that joins late reads no more than that."""
VERSIONS, MESSAGE = "versions", ".delta"
Pieces = dict[str, tuple[Tensor, TensorSlice]]


class Written(NamedTuple):
    """File of a version that a rank has written; no digest if another replica writes it, or after a problem."""

    name: str
    digest: str = ""
    total: int = 0
    """The `bit_sum` of the file's weights after this version."""
    bytes: int = 0
    problem: str = ""


class Pending(NamedTuple):
    """Version that a thread of each rank writes; base: id of the version before, or None for a full version."""

    version: int
    base: str | None
    pieces: Pieces
    written: Future[Written]


class WeightPublisher:
    """Writer of one rank's files of a weight store, in a thread beside training; rank 0 completes each version."""

    def __init__(self, job: Job, model: ShardedModel, dtype: torch.dtype, write_config: Callable[[Path], None]) -> None:
        """dtype: of published weights; an adapter's are float32. write_config: writes config and tokenizer."""
        self._job, self._model, self._write_config = job, model, write_config
        self._dtype = torch.float32 if model.adapter else dtype
        self._store = CheckpointStore(f"{job.spec.rollout.weight_store}/{VERSIONS}")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._pending: Pending | None = None
        self._base: tuple[str, Pieces] | None = None
        """(id, this rank's pieces) of the last complete version; None: the next version is full."""
        self._begun, self._deltas = -1, 0

    def publish(self, version: int, *, waits: bool) -> None:
        """Complete the version under way, and begin this one unless it was begun before; a collective of all ranks.

        While any rank still writes, the new version is skipped, so that training waits for no upload. waits: complete
        this version, too. If the store fails, a warning is recorded, the miss is counted, and the next version is full.
        """
        with recorder.counting(True):
            recorder.add("weight_store_missed", 0.0)  # so that each step records this metric
            is_free = self._finish(waits=waits)
            if version == self._begun:
                return
            if not is_free:
                recorder.add("weight_store_missed", float(dist.get_rank() == 0))
                return
            self._begin(version)
            if waits:
                self._finish(waits=True)

    def _begin(self, version: int) -> None:
        self._begun = version
        base = None if self._deltas == FULL_EVERY - 1 else self._base
        if problem := self._on_first_rank(lambda: self._store.begin(version)):
            self._fail(version, problem)
            return
        held = pieces_to_save(self._model.mesh, saved_tensors(self._model))
        pieces = {
            name: (tensor.to("cpu", written_type(name, self._dtype), copy=True), place)
            for name, (tensor, place) in held.items()
        }
        writing = self._writer.submit(self._write, self._address(version), pieces, base and base[1])
        self._pending = Pending(version, base and base[0], pieces, writing)

    def _write(self, uri: str, pieces: Pieces, last: Pieces | None) -> Written:
        """Write this rank's file of a version. Runs in a thread, so a problem is returned, not raised."""
        name = f"shard-{dist.get_rank()}.safetensors"
        try:
            with storage_errors(uri):
                return self._upload(uri, name, pieces, last) if pieces else Written(name)
        except EnvironmentProblem as error:
            return Written(name, problem=str(error))

    def _upload(self, uri: str, name: str, pieces: Pieces, last: Pieces | None) -> Written:
        upload = UploadFolder(uri)
        path = upload.folder / name
        if last is None:
            write_piece(path, pieces, self._dtype)
            if dist.get_rank() == 0:
                self._write_config(upload.folder / CONFIG_FOLDER)
        else:
            flat = {each: (pieces[each][0].flatten(), last[each][0].flatten()) for each in pieces}
            messages = {f"{each}{MESSAGE}": HeldTensor(encoded(*pair)) for each, pair in flat.items()}
            write_tensors(path, messages, torch.uint8, {})
        total = sum(int(bit_sum(tensor)) for tensor, _ in pieces.values())
        written = Written(name, _digest(path), total, path.stat().st_size)
        upload.upload()
        return written

    def _finish(self, *, waits: bool) -> bool:
        """Complete the version under way once all ranks have written it; return False if a rank still writes."""
        if (pending := self._pending) is None:
            return True
        own = pending.written.result() if waits or pending.written.done() else None
        every: list[Written | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        written = [each for each in every if each]
        if own is None or len(written) < len(every):
            return False
        self._pending = None
        files = {each.name: each.digest for each in written if each.digest}
        identity = _identity(pending.version, sum(each.total for each in written))
        state = {"model": None, "id": identity, "base": pending.base, "files": files, "job": document_of(self._job)}

        def complete() -> None:
            self._store.complete(self._address(pending.version), {STATE: json.dumps(state)})
            if pending.base is None:  # no reader needs any other version
                self._store.clear(but=pending.version)

        problem = next((each.problem for each in written if each.problem), "")
        if problem := problem or self._on_first_rank(complete):
            self._fail(pending.version, problem)
            return True
        self._base, self._deltas = (identity, pending.pieces), self._deltas + 1 if pending.base else 0
        recorder.add(f"weight_store_bytes/{'delta' if pending.base else 'full'}", own.bytes)
        return True

    def _address(self, version: int) -> str:
        return f"{self._store.uri}/{PREFIX}{version:06d}"

    def _fail(self, version: int, problem: str) -> None:
        self._base = None
        recorder.add("weight_store_missed", float(dist.get_rank() == 0))
        recorder.warn("weight_store", f"version {version} of the weights for readers: {problem}")

    @staticmethod
    def _on_first_rank(work: Callable[[], object]) -> str:
        """Call `work` on rank 0; return its error's text, or an empty text, on all ranks. A collective."""
        problem = [""]
        if dist.get_rank() == 0:
            try:
                work()
            except EnvironmentProblem as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem)
        return problem[0]


class WeightReader:
    """Reader of a weight store: it holds all weights of one version in memory, and catches up with the newest one."""

    job: Job
    full: str
    """Address of the full version to which the deltas up to the held version were applied."""

    def __init__(self, uri: str) -> None:
        """Open the store without reading it; `update` reads the first version."""
        self.uri, self._store = uri, CheckpointStore(f"{uri}/{VERSIONS}")
        self._places: dict[str, dict[str, TensorSlice]] = {}
        """File -> slices of the weights that each version of the file changes."""
        self.weights: dict[str, Tensor] = {}
        self.held = ""
        """Id of the version that `weights` hold; empty: no version."""

    def update(self) -> str:
        """Read the deltas since the held version or, where it is no longer listed, the full version and its deltas.

        Returns a sentence if a damaged delta is refused: the version before it stays, until a new full one comes.
        NumericsError for a damaged full version; EnvironmentProblem if there is none, or the store cannot be read.
        """
        with storage_errors(self.uri):
            chain = self._chain()
        known = [state["id"] for _, state in chain]
        for number in range(known.index(self.held) + 1 if self.held in known else 0, len(chain)):
            try:
                self._read(*chain[number])
            except NumericsError as error:
                if number == 0:
                    raise
                for each in chain[:number] if not self.held else ():
                    self._read(*each)
                return f"{error}; this version is refused"
        return ""

    def _chain(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Return the newest full version and the deltas that follow it, each with its state.json."""
        versions = [(each, each.state()) for each in self._store.all() if each.is_whole]
        full = [each for each in versions if each[1]["base"] is None]
        if not full:
            raise FileNotFoundError("no whole version of a model's weights is there")
        chain = [max(full, key=lambda each: (each[0].saved_at, each[0].step))]
        after = {state["base"]: (version, state) for version, state in versions}
        while following := after.get(chain[-1][1]["id"]):
            chain.append(following)
        return chain

    def _read(self, version: Checkpoint, state: Mapping[str, Any]) -> None:
        """Read a version into `weights`; NumericsError if the checksum of a file or of the resulting weights is wrong.

        A damaged file changes nothing. After a wrong checksum of the weights, no version is held.
        """
        is_full = state["base"] is None
        with TemporaryDirectory(prefix="rlhf-weights-") as folder, storage_errors(version.uri):
            files, path = open_storage(version.uri)
            found = {name: LocalFile(partial(str, f"{folder}/{name}")) for name in state["files"]}
            for name, digest in state["files"].items():
                files.get_file(f"{path}/{name}", f"{folder}/{name}")
                if _digest(Path(folder, name)) != digest:
                    raise NumericsError(f"{name} is not what was written (checksum)")
            self.held = ""
            if is_full:
                self._places = {name: places_in(file) for name, file in found.items()}
                stored = saved_by_ranks(found.values())
                self.weights = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in stored.items()}
                self.full, self.job = version.uri, Job.parse(state["job"])
            total = sum(self._take(name, file, is_full=is_full) for name, file in found.items())
            if _identity(version.step, total) != state["id"]:
                raise NumericsError("the resulting weights are not the trainer's (checksum)")
            self.held = state["id"]

    def _take(self, name: str, file: LocalFile, *, is_full: bool) -> int:
        """Copy or decode a file into the weights; return the `bit_sum` of the weights in the file's slices."""
        total = 0
        for weight, place in self._places[name].items():
            part = self.weights[weight][place.within(TensorSlice.whole(tuple(self.weights[weight].shape)))]
            if is_full:
                part.copy_(file.read(weight, ()))
            else:
                known = part.flatten()
                decode(file.read(f"{weight}{MESSAGE}", ()).clone(), known)  # a copy is aligned for views
                part.copy_(known.view(part.shape))
            total += int(bit_sum(part))
        return total


def _identity(version: int, total: int) -> str:
    """Return the id of a version, which contains the `bit_sum` of all its weights."""
    return f"{version}-{total % 2**64:016x}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
