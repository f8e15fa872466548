"""What an own algorithm or worker does wrong is one sentence with its file and line, and the exit code of user code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_api.exit_codes import ExitCode
from rlhf_api.job import Job
from rlhf_api.own_code import OwnCodeError
from rlhf_mapper.place import place
from rlhf_trainer.controller.batch import BatchSlice
from rlhf_trainer.controller.slot_process import CallRequest, SlotProcess
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.run.graph import graph_of
from rlhf_trainer.run.worker_specs import workers_of
from rlhf_trainer.workers.actor import ActorWorker
from tests.trainer.jobs import job as job_of

HEAD = """
import rlhf
from rlhf import Actor, Advantage, B, PolicyGradient, Reference, Reward, register, sample_and_learn
from rlhf.workers import ActorWorker
class Own(PolicyGradient):
    workers = {}
    step = staticmethod(sample_and_learn)
    def advantage(self, returns):
        return returns
"""
SPEC = {
    "algorithm": {"name": "Custom", "entrypoint": "own_mistake:Own", "options": {"kl": {"coefficient": 0.0}}},
    "models": {"actor": {"uri": "hf://a"}, "reward": {"uri": "hf://r"}},
    "data": {"train": {"uri": "hf://x"}, "maxPromptTokens": 4, "maxResponseTokens": 4},
    "training": {"totalSteps": 1, "promptBatchSize": 2},
    "resources": {"slotsPerNode": 2, "device": "CPU"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = [*sys.path]
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("own_mistake", None)


def own(folder: Path, source: str) -> Job:
    """A job whose algorithm is made from the text above by a change, or by what comes below it."""
    (folder / "own_mistake.py").write_text(HEAD + source)
    return job_of(folder, "job", SPEC)


def line_of(folder: Path, words: str) -> str:
    """Where words stand in the module, as a sentence says it."""
    lines = (folder / "own_mistake.py").read_text().splitlines()
    return f" ({folder / 'own_mistake.py'}:{next(n for n, line in enumerate(lines, 1) if words in line)})"


STEP = """
class Own(Own):
    workers = {WORKERS}
    @staticmethod
    def step(prompts, *, actor: Actor[B], reward: REWARD, advantage: Advantage[B]):
        batch = actor.generate_sequences(prompts)
        batch = reward.compute_reward(batch)
        CALL
        actor.update_actor(advantage.compute_advantage(batch))
"""


def step(call: str, *, reward: str = "Reward[B]", workers: str = "") -> str:
    return STEP.replace("CALL", call).replace("REWARD", reward).replace("WORKERS", workers)


WIRED = """
from rlhf_trainer.protocols import TransferProtocol
everything = lambda layout, rows: [range(rows)] * ROWS_OF
class Wired:
    def __init__(self, job): ...
    @register(PROTOCOL, reads=("tokens",), ADDS)
    def look(self, batch): ...
"""


def wired(protocol: str, adds: str = "", *, parts: str = "layout.world_size") -> str:
    """A step with a worker whose method has this protocol."""
    worker = WIRED.replace("PROTOCOL", protocol).replace("ADDS", adds).replace("ROWS_OF", parts)
    called = step("helper.look(batch)", workers="'helper': Wired")
    return worker + called.replace("advantage: Advantage", "helper, advantage: Advantage")


OWN = 'TransferProtocol(name="MINE", distribute=everything, collect=lambda layout: [(0,)])'
IN_THE_STEP = {  # name: (source, sentence with words of a line in brackets, words of the line that it ends with)
    "an unknown method": (step("actor.fly(batch)"), "actor has no method fly; ", "actor.fly"),
    "a method that is nearly right": (
        step("batch = actor.compute_log_probs(batch)"),
        "actor has no method compute_log_probs; did you mean compute_log_prob?",
        "actor.compute_log_probs",
    ),
    "a method of another role": (
        step("batch = reward.compute_cost(batch)"),
        "reward has no method compute_cost; did you mean compute_reward?",
        "reward.compute_cost",
    ),
    "the only generation": (  # without it the job's data would be all that it learns from
        step("pass").replace("generate_sequences", "generate_sequence"),
        "actor has no method generate_sequence; did you mean generate_sequences?",
        "actor.generate_sequence(",
    ),
    "a field that nobody adds": (
        step("pass") + "    def advantage(self, returns, values): return returns\n",
        "advantage.compute_advantage [returns, values] reads values; the batch holds prompt_ids, ",
        "advantage.compute_advantage",
    ),
    "a method that is not registered": (
        "class Looking(ActorWorker):\n    def look(self, batch): ...\n"
        + step("actor.look(batch)", workers="'actor': Looking"),
        "actor.look [def look] is not marked by register",
        "actor.look",
    ),
    "an annotation of a name that is not there": (
        step("pass", reward="'rlhf.Rewards[B]'"),
        "module 'rlhf' has no attribute 'Rewards'",
        "@staticmethod",
    ),
    "no protocol": (
        step("pass", reward="object"),
        "the step's reward has no worker and no protocol, such as Actor[B]; there are Actor, ",
        "@staticmethod",
    ),
    "rows that come twice": (
        wired("rlhf.ONE_TO_ALL", 'adds=("mine",)'),
        "helper.look [@register]: ONE_TO_ALL does not give each row once, so it can add no fields",
        "helper.look",
    ),
    "a batch for all ranks by a protocol of single ranks": (
        wired("rlhf.ALL_TO_ALL"),
        "helper.look [@register]: ALL_TO_ALL needs a batch for each of 2 ranks",
        "helper.look",
    ),
    "a protocol for fewer ranks": (
        wired(OWN, parts="1"),
        "helper.look [@register]: MINE gives rows to 1 ranks, but the model has 2",
        "helper.look",
    ),
    "rows that are not there": (
        wired(OWN.replace("everything", "lambda layout, rows: [range(rows + 1)] * 2")),
        "helper.look [@register]: MINE gives rows 0 to 3 of a batch of 2",
        "helper.look",
    ),
    "a value that it waits for": (
        step("actor.compute_loss(batch).result()"),
        "the step waits for a value of a call, so what it calls is not known before it runs",
        "compute_loss(batch).result()",
    ),
}


@pytest.mark.parametrize("name", IN_THE_STEP)
def test_in_the_step(folder: Path, name: str) -> None:
    source, sentence, words = IN_THE_STEP[name]
    made = own(folder, source)
    with pytest.raises(UserCodeError) as raised:
        graph_of(made, place(made, (0,)))
    said = str(raised.value)
    sentence = re.sub(r" \[(.+)\]", lambda found: line_of(folder, found[1]), sentence)
    assert said.startswith(f"job: spec.algorithm.entrypoint: {sentence}")
    assert said.endswith(line_of(folder, words))
    assert raised.value.exit_code == ExitCode.USER_CODE


def test_a_step_that_looks_at_values_is_told(folder: Path) -> None:
    with pytest.raises(OwnCodeError) as raised:
        own(folder, step("if batch['prompt_ids'].sum() > 0: pass"))
    assert "the step looks at the values of 'prompt_ids', but a step is recorded before it runs, and its " in str(
        raised.value
    )
    assert str(raised.value).endswith(line_of(folder, "if batch['prompt_ids']"))


MASK = torch.ones(2, 3)
FIELDS = {"scores": torch.ones(2), "finished": torch.ones(2), "valid": torch.ones(2), "response_mask": MASK}


def called(worker: type, method: str, arguments: Mapping[str, object], fields: Mapping[str, Tensor] = FIELDS) -> None:
    """A call of a worker in a process of a slot."""
    process = SlotProcess(pool="all", path=())
    process.join({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, lambda: 0)
    process.build("own", worker, arguments)
    rows = BatchSlice(step=1, rows=range(2), kept={}, blocks={name: [range(2)] for name in fields})
    request = CallRequest(number=1, role="own", method=method, arguments={}, batch=rows, counts=True, sent=0.0)
    process.run([request], *fields.values())


ADVANTAGES = {
    "no tensor": ("return [1.0, 2.0]", "TypeError: the advantage is list, expected a tensor [2, 3], or [N] with"),
    "another shape": (
        "return returns.repeat(2, 5)",
        "ValueError: the advantage has the shape [2, 10], expected a tensor",
    ),
    "other rows": (
        "return returns[:1]",
        "ValueError: the advantage has the shape [1], expected a tensor [2, 3], or [N]",
    ),
    "an error": ("return returns.fly()", "AttributeError: 'Tensor' object has no attribute 'fly'"),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_in_the_advantage(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_trainer.workers.advantage.rows_of_all_ranks", lambda here, _: here)
    code, sentence = ADVANTAGES[name]
    made = own(folder, f"class Own(Own):\n    def advantage(self, returns):\n        {code}\n")
    with pytest.raises(UserCodeError) as raised:
        called(workers_of(type(made.spec.algorithm))["advantage"], "compute_advantage", {"job": made})
    line = line_of(folder, code) if name == "an error" else r" \(\S+own_mistake.py:\d+\)"
    assert str(raised.value).startswith(f"own.compute_advantage on rank 0: {sentence}")
    assert str(raised.value).endswith(line) or re.search(f"{line}$", str(raised.value))


WORKER = """
class Helper:
    def __init__(self, job): ...
    @register(rlhf.DP_PROTO, reads=("scores",), adds=("mine",))
    def help(self, batch):
        CODE
class Own(Own):
    workers = {"helper": Helper}
    @staticmethod
    def step(prompts, *, actor: Actor[B], reward: Reward[B], helper):
        helper.help(reward.compute_reward(actor.generate_sequences(prompts)))
"""
WORKERS = {
    "an error": ("return 1 / 0", "ZeroDivisionError: division by zero", "1 / 0"),
    "an unknown field": (
        'return {"mine": batch["costs"]}',
        "LookupError: the batch holds no costs, only what the call reads: scores, finished, valid, response_mask",
        "batch[",
    ),
    "other fields than registered": (
        'return {"yours": batch["scores"]}',
        "TypeError: gave yours; registered are mine",
        "@register",
    ),
    "another number of rows": (
        'return {"mine": batch["scores"][:1]}',
        "ValueError: mine is [1], expected 2 rows",
        "@register",
    ),
}


@pytest.mark.parametrize("name", WORKERS)
def test_in_a_worker(folder: Path, name: str) -> None:
    code, sentence, words = WORKERS[name]
    made = own(folder, WORKER.replace("CODE", code))
    with pytest.raises(UserCodeError) as raised:
        called(workers_of(type(made.spec.algorithm))["helper"], "help", {"job": made})
    assert str(raised.value) == f"own.help on rank 0: {sentence}{line_of(folder, words)}"


MADE = {
    "an error": ("    def __init__(self, job): 1 / 0\n", "ZeroDivisionError: division by zero", "1 / 0"),
    "another signature": (
        "    def __init__(self): ...\n",
        "TypeError: Helper.__init__() got an unexpected keyword argument 'job'",
        "def __init__(self)",
    ),
    "no signature": ("", "TypeError: Helper() takes no arguments", "class Helper"),
}


@pytest.mark.parametrize("name", MADE)
def test_in_the_making_of_a_worker(folder: Path, name: str) -> None:
    code, sentence, words = MADE[name]
    made = own(folder, WORKER.replace("    def __init__(self, job): ...\n", code).replace("CODE", "pass"))
    with pytest.raises(UserCodeError) as raised:
        called(workers_of(type(made.spec.algorithm))["helper"], "help", {"job": made})
    assert str(raised.value) == f"own on rank 0: {sentence}{line_of(folder, words)}"


def test_what_is_no_protocol_is_told(folder: Path) -> None:
    with pytest.raises(OwnCodeError) as raised:
        own(folder, WORKER.replace("rlhf.DP_PROTO", "'DP_PROTO'"))
    assert "TypeError: register got 'DP_PROTO', expected a protocol, such as rlhf.DP_PROTO" in str(raised.value)
    assert str(raised.value).endswith(line_of(folder, "@register"))


def test_in_the_objective(folder: Path) -> None:
    made = own(
        folder,
        "class Own(Own):\n    def objective(self, log_probs, mask): return (log_probs * mask).sum()\n",
    )
    actor = ActorWorker.__new__(ActorWorker)
    actor._algorithm = made.spec.algorithm  # type: ignore[assignment]
    with pytest.raises(UserCodeError) as raised:
        actor._own_objective({"response_mask": MASK})(MASK, MASK, MASK, MASK)
    assert str(raised.value) == f"objective gave a tensor [], expected one [2, 3]{line_of(folder, 'objective')}"


@pytest.mark.parametrize(
    ("parameter", "estimates"), [("ratio", ""), ("token_weights", ""), ("rewards", "token_weights")]
)
def test_an_objective_that_reads_what_is_not_there(folder: Path, parameter: str, estimates: str) -> None:
    fields = f"    estimates = ('advantages', {estimates!r})\n" if estimates else ""
    with pytest.raises(OwnCodeError) as raised:
        own(folder, f"class Own(Own):\n{fields}    def objective(self, log_probs, {parameter}): return log_probs\n")
    known = f"log_probs, old_log_probs, advantages{', mask or token_weights' if estimates else ' or mask'}"
    assert f"TypeError: the objective of Own has the parameter {parameter}, expected {known}" in str(raised.value)
    assert str(raised.value).endswith(line_of(folder, "class Own(Own)"))


def test_an_error_of_ours_stays_one(folder: Path) -> None:
    made = own(folder, "")
    with pytest.raises(Exception, match=r"^own on rank 0: TypeError: .*__init__") as raised:
        called(workers_of(type(made.spec.algorithm))["actor"], "update_actor", {})
    assert not isinstance(raised.value, UserCodeError)
