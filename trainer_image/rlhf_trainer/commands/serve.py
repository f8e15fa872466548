"""Server of a run's model: vLLM's program, as the only child of this process, with what the run knows of its model."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import typer
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_trainer.checkpoint import PREFIX, Checkpoint
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.generation.vllm_arguments import SETTINGS
from rlhf_trainer.run.stopping import Stopped, StopSignals
from rlhf_trainer.run_folder.commands import job_folders
from rlhf_trainer.run_folder.export import export
from rlhf_trainer.run_folder.folder import JOB_FILE, read_job, reading

ACTOR: Final = "actor"
PROGRAM = "vllm.entrypoints.openai.api_server"
DTYPES = {"FP32": "float32", "BF16": "bfloat16"}
"""vLLM's words for `training.precision`."""
CPU_CACHE = 2**32
"""Bytes of the KV cache on CPU. Without a number vLLM asks for 92 % of the host's memory, and ends if less is free."""
STOP_SECONDS = 60.0
"""Seconds that vLLM has to end after a signal, before it is killed."""


def serve_until_stopped(place: str, *, host: str, port: int, options: Sequence[str]) -> None:
    """Serve the model at `place` until a stop signal; options: of vLLM's server. SpecError for a mistake."""
    require_free(host, port)
    if find_spec("vllm") is None:
        raise EnvironmentProblem("vLLM is not installed; the extras cpu and gpu of rlhf-operator bring it")
    on_gpu = bool(gpus_here())
    variables = {} if on_gpu else {key: str(value) for key, value in SETTINGS["cpu_environment"].items()}
    with served_model(place) as (folder, job):
        name = job.name if job else folder.name
        typer.echo(f"serving {folder} as {name} at http://{host}:{port}/v1; Ctrl-C ends it")
        own = [f"--model={folder}", f"--served-model-name={name}", *server_options(job, on_gpu=on_gpu)]
        command = [sys.executable, "-m", PROGRAM, f"--host={host}", f"--port={port}", *own, *options]
        _run_until_stopped(command, {**variables, **os.environ})


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
def served_model(place: str) -> Iterator[tuple[Path, Job | None]]:
    """Yield (folder of a language model, its job) by a run, job, model or checkpoint, which is exported for the block.

    The job is None for a model folder that no run wrote. SpecError if there is no such model.
    """
    folder = Path(place)
    if "://" in place and not folder.name.startswith(PREFIX):
        raise SpecError([Problem(place, "is no checkpoint; a model is served from a folder of this machine")])
    if folder.name.startswith(PREFIX) and not (folder / CONFIG_NAME).is_file():
        with TemporaryDirectory(prefix="rlhf-serve-") as exported:
            export(place, Path(exported) / "model", merges=None)
            with reading(place):
                text = Checkpoint(step=0, uri=place.rstrip("/")).text(JOB_FILE)
                job = Job.parse(kubectl_yaml.read(text, "")[0])
            yield Path(exported) / "model", _generating(job, place)
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
    yield folder.resolve(), _generating(read_job(made_by), place) if made_by.is_file() else None


def _generating(job: Job, place: str) -> Job:
    if ACTOR not in job.trained():
        raise SpecError([Problem(place, f"is of {job.name}, which trains no language model")])
    return job


def _run_until_stopped(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run the server until it ends, or until a signal asks this process to stop. EnvironmentProblem if it fails.

    The server has a session of its own: a terminal's Ctrl-C reaches this process only, which forwards it once.
    """
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        with StopSignals(typer.echo).handled():
            server.wait()
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
