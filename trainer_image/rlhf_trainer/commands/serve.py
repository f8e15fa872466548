"""Server of a run's model: vLLM's program, as the only child of this process, with options that follow from the job."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import typer
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import PREFIX, Checkpoint
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem, TrainerError
from rlhf_trainer.generation.endpoints import CALL, EXTENSION, FORGET
from rlhf_trainer.generation.vllm_arguments import SETTINGS
from rlhf_trainer.hybrid_engine.weight_store import WeightReader
from rlhf_trainer.run.stopping import Stopped, StopSignals
from rlhf_trainer.run_folder.commands import job_folders
from rlhf_trainer.run_folder.export import export, write_held
from rlhf_trainer.run_folder.folder import JOB_FILE, read_job, reading

ACTOR: Final = "actor"
PROGRAM = "vllm.entrypoints.openai.api_server"
DTYPES = {"FP32": "float32", "BF16": "bfloat16"}
"""vLLM's words for `training.precision`."""
CPU_CACHE = 2**32
"""Bytes of the KV cache on CPU. Without a number vLLM asks for 92 % of the host's memory, and ends if less is free."""
STOP_SECONDS = 60.0
"""Seconds that vLLM has to end after a signal, before it is killed."""
STORES = ("file://", "s3://", "gs://")
DEVELOPER_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment variable that opens the HTTP paths by which vLLM's server gets new weights."""
LOOK_SECONDS = 10.0
"""Seconds between two looks at a weight store."""


def serve_until_stopped(place: str, *, host: str, port: int, options: Sequence[str]) -> None:
    """Serve the model at `place` until a stop signal; options: of vLLM's server. SpecError for a mistake."""
    require_free(host, port)
    if find_spec("vllm") is None:
        raise EnvironmentProblem("vLLM is not installed; the extras cpu and gpu of rlhf-operator bring it")
    on_gpu = bool(gpus_here())
    variables = {} if on_gpu else {key: str(value) for key, value in SETTINGS["cpu_environment"].items()}
    with served_model(place) as (folder, job, reader):
        name = job.name if job else folder.name
        typer.echo(f"serving {folder} as {name} at http://{host}:{port}/v1; Ctrl-C ends it")
        own = [f"--model={folder}", f"--served-model-name={name}", *server_options(job, on_gpu=on_gpu)]
        command = [sys.executable, "-m", PROGRAM, f"--host={host}", f"--port={port}", *own, *options]
        look: Callable[[], object] = bool
        if reader:
            look = Follower(reader, folder, f"http://{f'[{host}]' if ':' in host else host}:{port}").look
            command, variables = [*command, f"--worker-extension-cls={EXTENSION}"], {**variables, **DEVELOPER_MODE}
        _run_until_stopped(command, {**variables, **os.environ}, look)


class Follower:
    """Follower of a weight store, which keeps a running server at the newest version."""

    def __init__(self, reader: WeightReader, folder: Path, url: str) -> None:
        """reader: holds the version in `folder`, with which the server at `url` starts."""
        self._reader, self._folder, self._url = reader, folder, url
        self._served, self._printed = reader.held, ""

    def look(self) -> None:
        """Have the server load a newer version, if there is one; print the result, unless it was printed last time."""
        try:
            sentence = self._reader.update()
            if self._reader.held not in ("", self._served):
                write_held(self._reader, self._folder)
                load = {"method": "load_folder", "args": [str(self._folder)]}
                for route, content in ((CALL, load), (FORGET, None)):
                    httpx.post(f"{self._url}{route}", json=content, timeout=None, trust_env=False).raise_for_status()
                self._served = self._reader.held
                sentence = sentence or f"serving version {self._served} of {self._reader.uri}"
        except (TrainerError, httpx.HTTPError) as error:
            sentence = f"no newer version is served: {error}"
        if sentence not in ("", self._printed):
            typer.echo(sentence)
            self._printed = sentence


def server_options(job: Job | None, *, on_gpu: bool) -> list[str]:
    """Return vLLM's options for a job's model, whose folder has chat template, tokenizer and end tokens."""
    options = [] if on_gpu else ["--enforce-eager", f"--kv-cache-memory-bytes={CPU_CACHE}"]
    if job is None:
        return options
    options.append(f"--dtype={DTYPES.get(job.spec.training.precision) or DTYPES['BF16' if on_gpu else 'FP32']}")
    if arguments := job.spec.data.chat_template_arguments:
        options.append(f"--default-chat-template-kwargs={json.dumps(arguments)}")
    if job.models()[ACTOR].trust_remote_code:
        options.append("--trust-remote-code")
    return options


def require_free(host: str, port: int) -> None:
    """Raise SpecError if this process cannot listen on the address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise SpecError([Problem("--host, --port", f"{host}:{port}: {str(error.strerror).split(' (')[0]}")]) from None


@contextmanager
def served_model(place: str) -> Iterator[tuple[Path, Job | None, WeightReader | None]]:
    """Yield (folder of a language model, its job, its reader) by a run, job, model, checkpoint or weight store.

    A checkpoint or version is exported for the block. The job is None for a model folder that no run wrote, the reader
    unless the place is a weight store. SpecError if there is no such model.
    """
    folder = Path(place)
    if place.startswith(STORES) and not folder.name.startswith(PREFIX):
        reader = WeightReader(place)
        typer.echo(reader.update() or f"read version {reader.held} of {place}")
        with TemporaryDirectory(prefix="rlhf-serve-") as exported:
            write_held(reader, Path(exported) / "model")
            yield Path(exported) / "model", reader.job, reader
        return
    if "://" in place and not folder.name.startswith(PREFIX):
        raise SpecError([Problem(place, "is no checkpoint; a model is served from a folder of this machine")])
    if folder.name.startswith(PREFIX) and not (folder / CONFIG_NAME).is_file():
        with TemporaryDirectory(prefix="rlhf-serve-") as exported:
            export(place, Path(exported) / "model", merges=None)
            with reading(place):
                text = Checkpoint(step=0, uri=place.rstrip("/")).text(JOB_FILE)
                job = Job.parse(kubectl_yaml.read(text, "")[0])
            yield Path(exported) / "model", _generating(job, place), None
        return
    if not folder.is_dir():
        raise SpecError([Problem(place, "is no folder")])
    if not (folder / CONFIG_NAME).is_file():
        if (folder / ADAPTER_CONFIG_NAME).is_file():
            raise SpecError([Problem(place, "is an adapter; serve the folder `model` beside it, where it is merged")])
        jobs = [folder] if (folder / JOB_FILE).is_file() else [each.path for each in job_folders(folder)]
        ended = [each for each in jobs if (each / "model" / CONFIG_NAME).is_file()]
        generating = [each for each in ended if ACTOR in read_job(each / JOB_FILE).trained()]
        if not generating:
            hint = "`rlhf checkpoints` lists the checkpoints of a run, which can be served, too"
            raise SpecError([Problem(place, f"has no trained language model; {hint}")])
        folder = generating[-1] / "model"
    made_by = folder.resolve().parent / JOB_FILE
    yield folder.resolve(), _generating(read_job(made_by), place) if made_by.is_file() else None, None


def _generating(job: Job, place: str) -> Job:
    if ACTOR not in job.trained():
        raise SpecError([Problem(place, f"is of {job.name}, which trains no language model")])
    return job


def _run_until_stopped(command: Sequence[str], environment: dict[str, str], look: Callable[[], object]) -> None:
    """Run the server until it ends, or until a signal asks this process to stop. EnvironmentProblem if it fails.

    The server has a session of its own: a terminal's Ctrl-C reaches this process only, which forwards it once. look: is
    called every `LOOK_SECONDS` while the server runs.
    """
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        with StopSignals(typer.echo).handled():
            while _is_running(server):
                look()
    except Stopped:
        server.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
        return
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    if server.returncode:
        raise EnvironmentProblem(f"vLLM's server ended with exit code {server.returncode}; its last lines say why")


def _is_running(server: subprocess.Popen[bytes]) -> bool:
    """Wait for `LOOK_SECONDS`, or until the server ends; return whether it still runs."""
    with suppress(subprocess.TimeoutExpired):
        server.wait(LOOK_SECONDS)
    return server.poll() is None
