"""`rlhf serve` serves what a run left, and lm-eval measures it through the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rlhf_trainer.commands.cli import app
from rlhf_trainer.commands.serve import require_free, served_model, server_options
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import ROOT, rlhf
from tests.trainer.hybrid_engine.test_a_weight_store_may_fail import publisher_of
from tests.trainer.ranks import run_kept_ranks
from tests.trainer.tiny import save_tiny, tiny_config
from tests.trainer.training.test_an_adapter_is_trained_beside_frozen_weights import train

LM_EVAL = ROOT / ".venv-lm-eval" / "bin" / "python"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ mood | default('') }}"
)
MANIFEST = """
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {{name: words}}
spec:
  algorithm: {{name: SFT}}
  models: {{actor: {{uri: "file://{folder}/start", lora: {{rank: 4}}, optimizer: {{learningRate: 1e-2}}}}}}
  data:
    train: {{uri: "file://{folder}/train.jsonl", responseKey: response}}
    chatTemplateArguments: {{mood: calm}}
    maxPromptTokens: 64
    maxResponseTokens: 16
  training: {{totalSteps: 3, batchSize: 4}}
  checkpoint: {{everySteps: 3}}
  resources: {{slotsPerNode: 1}}
"""
WORDS = ("yes", "no", "maybe", "never")
QUESTIONS = [f"Is {number} more than {number % 5}?" for number in range(12)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` of one job, which trained an adapter."""
    folder = tmp_path_factory.mktemp("served")
    save_tiny(folder / "start", seed=2)
    (folder / "start" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": question, "response": WORDS[place % 4]} for place, question in enumerate(QUESTIONS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(MANIFEST.format(folder=folder))
    done = rlhf("run", folder / "job.yaml", "--output", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder


class Served:
    """`rlhf serve` in a process of its own."""

    def __init__(self, place: Path | str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = ["serve", str(place), f"--port={port}", "--", "--max-model-len=256", "--kv-cache-memory-bytes=67108864"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_trainer", *words], stdout=file, stderr=file, cwd=ROOT
            )

    def wait(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.is_healthy():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture(scope="module")
def served(trained: Path) -> Iterator[Served]:
    server = Served(trained / "run", trained / "server.log")
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait()


def likeliest(folder: Path) -> list[str]:
    """The word that the folder's model finds likeliest after each question, by transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def log_prob(question: str, word: str) -> float:
        before, whole = (tokenizer(text).input_ids for text in (question, f"{question} {word}"))
        with torch.no_grad():
            log_probs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        return sum(float(log_probs[place - 1, whole[place]]) for place in range(len(before), len(whole)))

    return [max(WORDS, key=lambda word: log_prob(question, word)) for question in QUESTIONS]


def measure(folder: Path, url: str) -> dict[str, Any]:
    """Run lm-eval on a task of our own. Its right answers are yes for half of the questions."""
    if not LM_EVAL.exists():
        pytest.skip("lm-eval is not installed: make lm-eval")
    task = folder / "task"
    task.mkdir()
    best = likeliest(folder / "run" / "words" / "model")
    answers = [word if place % 3 else WORDS[WORDS.index(word) - 1] for place, word in enumerate(best)]
    rows = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    (task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(task / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": list(WORDS),
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (task / "words.yaml").write_text(yaml.safe_dump(about))
    model = f"model=words,base_url={url}/v1/completions,tokenizer={folder}/run/words/model"
    command = [str(LM_EVAL), "-m", "lm_eval", "run", "--model=local-completions", f"--model_args={model}"]
    command += ["--tasks=words", f"--include_path={task}", f"--output_path={folder / 'measured'}"]
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (folder / "measured").rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]["words"]
    return results


@pytest.mark.slow
def test_lm_eval_measures_a_served_run(trained: Path, served: Served) -> None:
    found = measure(trained, served.url)
    assert found["acc,none"] == pytest.approx(8 / 12)


@pytest.mark.slow
def test_a_chat_goes_through_the_template_of_the_run(trained: Path, served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "run" / "words" / "model")
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    question = {"model": "words", "messages": chat, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=question, trust_env=False, timeout=60).json()
    text = tokenizer.apply_chat_template(chat, tokenize=False, mood="calm")
    assert text.endswith("calm")
    assert answer["usage"]["prompt_tokens"] == len(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.slow
def test_ctrl_c_ends_the_server_without_an_error(served: Served) -> None:
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    assert children
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(PATIENCE_SECONDS) == 0, served.log.read_text()[-3000:]
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_checkpoint_is_served_with_its_adapter_merged(trained: Path) -> None:
    with served_model(str(trained / "run" / "words" / "checkpoints" / "step-000003")) as (folder, job, _):
        ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        options = server_options(job, on_gpu=True)
    theirs = AutoModelForCausalLM.from_pretrained(trained / "run" / "words" / "model").state_dict()
    assert not folder.exists()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "--dtype=bfloat16" in options
    assert '--default-chat-template-kwargs={"mood": "calm"}' in options


def publish(folder: str, output: str) -> None:
    """A version of an adapter and, once somebody has asked for it, the next one."""
    trainer, publisher = publisher_of(folder, Path(output))
    for version in (1, 2):
        until = time.monotonic() + PATIENCE_SECONDS
        while version == 2 and not (Path(output) / "asked").exists():
            assert time.monotonic() < until, "nobody asks for the second version"
            time.sleep(0.1)
        train(trainer, range(version, version + 1))
        publisher.publish(version, waits=True)


def log_prob(server: Served) -> float:
    """The log-probability of a prompt's token by the server."""
    question = {"model": "adapted", "prompt": "Is 7 more than 3?", "max_tokens": 1, "logprobs": 0, "echo": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=question, trust_env=False, timeout=60).json()
    return float(answer["choices"][0]["logprobs"]["token_logprobs"][1])


@pytest.mark.slow
def test_a_server_follows_a_weight_store(tmp_path: Path) -> None:
    """Its answers after the second version are those of a server that begins with it."""
    folder, uri = save_tiny(tmp_path / "start", seed=2), f"file://{tmp_path}/store"
    with ThreadPoolExecutor() as pool:
        published = pool.submit(run_kept_ranks, 1, publish, folder, str(tmp_path))
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(tmp_path.glob("store/versions/step-000001/COMPLETE")):
            assert time.monotonic() < until, "no version comes"
            time.sleep(0.1)
        servers = [Served(uri, tmp_path / "first.log")]
        try:
            servers[0].wait()
            before = log_prob(servers[0])
            (tmp_path / "asked").touch()
            published.result()
            while f"of {uri}" not in servers[0].log.read_text().partition("serving version 2-")[2]:
                assert time.monotonic() < until + PATIENCE_SECONDS, servers[0].log.read_text()[-3000:]
                time.sleep(0.1)
            servers.append(Served(uri, tmp_path / "second.log"))
            servers[1].wait()
            assert log_prob(servers[0]) == log_prob(servers[1]) != before
        finally:
            for server in servers:
                server.process.terminate()
                server.process.wait()


def run_of(folder: Path, algorithm: str, role: str, made: str) -> Path:
    """A run folder with a job of this algorithm, which has made a folder with a config."""
    text = MANIFEST.format(folder=folder).replace("SFT", algorithm).replace("actor", role)
    made_folder = folder / "run" / "words" / made
    made_folder.mkdir(parents=True)
    (folder / "run" / "words" / "job.yaml").write_text(text)
    tiny_config().save_pretrained(made_folder)
    return folder / "run"


def adapter_of(folder: Path) -> Path:
    """A folder with an adapter, as PEFT and a run write it."""
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    return folder / "adapter"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (lambda folder: folder / "none", "none: is no folder"),
        (lambda folder: folder, "is no run folder"),
        (lambda folder: run_of(folder, "RewardModel", "reward", "model"), "run: has no trained language model"),
        (lambda folder: run_of(folder, "RewardModel", "reward", "model") / "words" / "model", "is of words"),
        (lambda folder: run_of(folder, "SFT", "actor", "unfinished"), "run: has no trained language model"),
        (lambda folder: folder / "step-000004", "step-000004: is no checkpoint"),
        (lambda _: "hf://Qwen/Qwen3-0.6B", "Qwen3-0.6B: is no checkpoint; a model is served from a folder"),
        (adapter_of, "adapter: is an adapter; serve the folder `model` beside it"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(tmp_path: Path, place: Any, sentence: str) -> None:
    done = CliRunner().invoke(app, ["serve", str(place(tmp_path)), "--port=18437"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert sentence in line


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", str(tmp_path), f"--port={port}"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line == f"error: --host, --port: 127.0.0.1:{port}: Address already in use"


def test_a_host_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--host=nowhere.invalid"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --host, --port: nowhere.invalid:8000: ")


def test_an_address_of_ipv6_is_tried_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, socket.AddressFamily]] = []

    def play(address: Any, *, family: socket.AddressFamily) -> socket.socket:
        tried.append((address, family))
        return socket.socket()

    monkeypatch.setattr(socket, "create_server", play)
    require_free("::1", 8000)
    assert tried == [(("::1", 8000), socket.AF_INET6)]
