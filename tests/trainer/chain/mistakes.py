"""What can go wrong, as a user meets it: the one list behind docs/messages.md and the tests that cause it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_api.exit_codes import ExitCode
from tests.trainer.chain.conftest import MANIFEST

DOCUMENTS = MANIFEST.read_text().split("---\n")
SFT = DOCUMENTS[0]
PPO = """\
apiVersion: rlhf.hybridflow.io/v1alpha1
kind: RLHFJob
metadata: {name: ppo}
spec:
  algorithm: {name: PPO}
  models:
    actor: {uri: "file://models/language"}
    critic: {uri: "file://models/reward"}
    reward: {uri: "file://models/reward"}
  data:
    train: {uri: package://rlhf_examples/helpful/train.jsonl}
    maxPromptTokens: 16
    maxResponseTokens: 8
  training: {totalSteps: 1, promptBatchSize: 4}
  resources: {slotsPerNode: 1}
"""
FUNCTIONS = "tests.trainer.rewards.user_functions"
OWN = """\
import rlhf


class Helper:
    def __init__(self, job): ...

    @rlhf.register(rlhf.DP_PROTO, reads=("scores",), adds=("scores",))
    def help(self, batch):
        return {"scores": batch["scores"] / 1}


class Own(rlhf.PolicyGradient):
    workers = {"helper": Helper}

    @staticmethod
    def step(prompts, *, actor: rlhf.Actor, reward: rlhf.Reward, helper, advantage: rlhf.Advantage):
        batch = helper.help(reward.compute_reward(actor.generate_sequences(prompts)))
        actor.update_actor(advantage.compute_advantage(batch))

    def advantage(self, returns):
        return returns
"""
"""The module of an algorithm of one's own, for a mistake to be made in it."""
SHORT = ("training.totalSteps=3", "evaluation.data.limit=8")
ENDLESS = ("training.totalSteps=100000", "evaluation.data.limit=8")


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """Something that goes wrong, and what the user is told."""

    sentence: str
    """What stands on stderr after `error: `; `…` is anything."""
    code: ExitCode
    remedy: str = ""
    """What to do, for the page; empty if the sentence says it."""
    how: Literal["validate", "plan", "before Ray", "run"] = "run"
    manifest: str = SFT
    sets: tuple[str, ...] = SHORT
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], object] = lambda folder: None
    """Makes in the manifest's folder what the mistake needs."""
    disk: str = ""
    """Size of a disk of its own, mounted at `disk` in the manifest's folder."""

    def matches(self, text: str) -> bool:
        """Whether a text is the sentence."""
        return matches(self.sentence, text)


def matches(sentence: str, text: str) -> bool:
    """Whether a text is a sentence, in which `…` is anything."""
    return re.fullmatch(".*".join(map(re.escape, sentence.split("…"))), text, re.DOTALL) is not None


def relabelled(folder: Path) -> None:
    """A second tokenizer, in which two words have changed places."""
    path = shutil.copytree(folder / "models" / "reward", folder / "other") / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["!"], words["#"] = words["#"], words["!"]
    path.write_text(json.dumps(tokenizer))


def long_model(folder: Path) -> None:
    """A model that can read a million tokens."""
    path = shutil.copytree(folder / "models" / "language", folder / "long") / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 90000000'))


def pickled(folder: Path) -> None:
    """A model folder whose weights are a pickle; opening it would make the folder `was-run`."""
    shutil.copytree(folder / "models" / "language", folder / "pickled")
    (folder / "pickled" / "model.safetensors").unlink()
    payload = b"cos\nmkdir\n(S'" + str(folder / "was-run").encode() + b"'\ntR."
    (folder / "pickled" / "pytorch_model.bin").write_bytes(payload)


def file(name: str, text: str) -> Callable[[Path], object]:
    """Writes a file into the manifest's folder, or into a new folder there."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write


FILLS_THE_DISK = (
    f"--set=models.reward={{{{entrypoint: '{FUNCTIONS}:fills_the_disk', "
    "arguments: {{file: '{folder}/disk/filler'}}}}"
)
LLAMA_7B = """\
{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000}
"""
"""The config.json of a model too large for a small machine."""


SPEC, DATA, ENVIRONMENT = ExitCode.SPEC, ExitCode.DATA, ExitCode.ENVIRONMENT
VALIDATE: dict[str, Mistake] = {
    "an unknown field": Mistake(
        how="validate",
        sets=("training.batchSizes=4",),
        code=SPEC,
        sentence="helpful-sft: spec.training.batchSizes: unknown field; did you mean batchSize?",
    ),
    "a wrong type": Mistake(
        how="validate",
        sets=("training.totalSteps=many",),
        code=SPEC,
        sentence='helpful-sft: spec.training.totalSteps: is "many" (text), expected a whole number',
    ),
    "an algorithm that is not there": Mistake(
        how="validate",
        manifest=PPO,
        sets=("algorithm={name: Custom, entrypoint: 'nowhere:Own'}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.algorithm.entrypoint: nowhere:Own cannot be imported: ModuleNotFoundError: "
        "No module named 'nowhere'",
        remedy="Put the module beside the manifest, into the image, or on `PYTHONPATH`.",
    ),
    "an algorithm whose module fails": Mistake(
        how="validate",
        manifest=PPO,
        prepare=file("failing_module.py", "import rlhf\n\nnumber = 1 / 0\n"),
        sets=("algorithm={name: Custom, entrypoint: 'failing_module:Own'}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.algorithm.entrypoint: failing_module:Own cannot be imported: ZeroDivisionError: "
        "division by zero (…/failing_module.py:3)",
    ),
    "a wrong option of an own algorithm": Mistake(
        how="validate",
        manifest=PPO,
        sets=("algorithm={name: Custom, entrypoint: 'rlhf_trainer.algorithms.ppo:PPO', options: {clipRange: 3}}",),
        code=SPEC,
        sentence="ppo: spec.algorithm.options.clipRange: is 3, expected less than 1",
    ),
    "a tab in the manifest": Mistake(
        how="validate",
        manifest=SFT.replace("  models:", "\tmodels:"),
        code=SPEC,
        sentence="…job.yaml: line …: cannot be read: there is a tab, and only spaces indent",
    ),
    "a quote that is not closed": Mistake(
        how="validate",
        manifest=SFT.replace("name: helpful-sft", 'name: "helpful-sft'),
        code=SPEC,
        sentence="…job.yaml: line …: cannot be read: the quote of line … is not closed",
    ),
    "wrong indentation": Mistake(
        how="validate",
        manifest=SFT.replace("  models:", "   models:"),
        code=SPEC,
        sentence="…job.yaml: line …: cannot be read: its indentation does not fit the lines above",
    ),
    "a key that is given twice": Mistake(
        how="validate",
        manifest=SFT + "kind: RLHFJob\n",
        code=SPEC,
        sentence='…job.yaml: line …: cannot be read: "kind" is given twice, first on line 5',
    ),
    "a list where a mapping belongs": Mistake(
        how="validate",
        sets=("data=[]",),
        code=SPEC,
        sentence="helpful-sft: spec.data: is a list, expected a mapping",
    ),
    "an empty manifest": Mistake(
        how="validate",
        manifest="",
        sets=(),
        code=SPEC,
        sentence="…job.yaml: holds no RLHFJob, it is empty",
    ),
    "a password in the URL of a reward": Mistake(
        how="validate",
        manifest=PPO,
        sets=("models.reward={url: 'https://me:secret@host/score'}",),
        code=SPEC,
        sentence="ppo: spec.models.reward.url: holds a name, a password or a query; "
        "a secret is given by an environment variable",
        remedy="Put the token into an environment variable, and its name into `tokenVariable`.",
    ),
    "two jobs of one name": Mistake(
        how="validate",
        manifest=SFT + "---\n" + SFT,
        sets=(),
        code=SPEC,
        sentence="helpful-sft: metadata.name: is used by 2 documents",
    ),
}
PLAN: dict[str, Mistake] = {
    "a GPU that nobody knows": Mistake(
        how="plan",
        options=("--nodes=1", "--gpus-per-node=8", "--gpu=a101"),
        code=SPEC,
        sentence="--gpu: a101 is no known GPU; did you mean a10? An --inventory of `rlhf plan` describes others",
    ),
    "no nodes to plan for": Mistake(
        how="plan",
        options=("--nodes=0", "--gpus-per-node=8", "--gpu=a100-80g"),
        code=SPEC,
        sentence="--nodes: is 0, expected at least 1",
    ),
    "half a description of a cluster": Mistake(
        how="plan",
        options=("--nodes=2", "--gpus-per-node=8"),
        code=SPEC,
        sentence="--gpu: is missing, --nodes needs it",
    ),
    "a bandwidth in a wrong unit": Mistake(
        how="plan",
        prepare=file("cluster.yaml", "nodes: [{gpu: a100-80g, count: 2, gpusPerNode: 8, interNodeGbps: 25e9}]"),
        options=("--inventory={folder}/cluster.yaml",),
        code=SPEC,
        sentence="…cluster.yaml: nodes.0.interNodeGbps: is 2.5e+10, expected 0.001 to 100000; "
        "it is in Gb/s (1e9 bits/s), one direction",
    ),
    "a price that is missing": Mistake(
        how="plan",
        options=("--nodes=1", "--gpus-per-node=8", "--gpu=a100-80g", "--objective=lowest-cost"),
        code=SPEC,
        sentence="--objective: lowest-cost needs the pricePerGpuHour of all nodes",
        remedy="Give an `--inventory` with prices; on a cluster, prices in the chart's `cluster.nodeGroups`.",
    ),
    "a step that cannot be so fast": Mistake(
        how="plan",
        options=("--nodes=1", "--gpus-per-node=8", "--gpu=a100-80g", "--objective=fewest-gpus=0.000000001"),
        code=ENVIRONMENT,
        sentence="helpful-sft: no mapping takes … a step or less; the fastest takes …",
    ),
    "a model folder without config.json": Mistake(
        how="plan",
        prepare=file("bare/readme", ""),
        sets=("models.actor.uri=file://bare",),
        code=DATA,
        sentence="helpful-sft: spec.models.actor.uri: …/bare: the folder has no config.json",
        remedy="Name the folder of a Hugging Face model; to plan, its `config.json` is enough.",
    ),
    "a model that is no decoder": Mistake(
        how="plan",
        prepare=file("t5/config.json", '{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}'),
        sets=("models.actor.uri=file://t5",),
        code=DATA,
        sentence="helpful-sft: spec.models.actor.uri: …/t5/config.json: T5ForConditionalGeneration is no decoder "
        "(such as LlamaForCausalLM), and only those are trained here",
    ),
    "a model that fits nowhere": Mistake(
        how="plan",
        prepare=file("llama/config.json", LLAMA_7B),
        sets=("models.actor.uri=file://llama",),
        options=("--nodes=1", "--gpus-per-node=1", "--gpu=a10-24g"),
        code=ENVIRONMENT,
        sentence="helpful-sft: the states of actor take … GB, but 1 x a10-24g hold … GB, and half of the host memory, "
        "… GB, is too small for them to wait there; …",
    ),
}
BEFORE_RAY: dict[str, Mistake] = {
    "a batch that does not divide": Mistake(
        how="before Ray",
        sets=("training.batchSize=33",),
        code=SPEC,
        sentence="helpful-sft: spec.training.batchSize: …",
        remedy="Take a multiple of the slots.",
    ),
    "sizes that do not fill the slots": Mistake(
        how="before Ray",
        sets=("models.actor.parallelism.tensor=3",),
        code=SPEC,
        sentence="helpful-sft: spec.models.actor.parallelism: p-t-d 1-3-1 takes 3 slots, but pool all has 2",
        remedy="Context x pipeline x tensor x data must be the slots of the pool; without `data` it is derived.",
    ),
    "a size that the model cannot be cut into": Mistake(
        how="before Ray",
        sets=("models.actor.parallelism.tensor=4", "resources.slotsPerNode=4"),
        code=SPEC,
        sentence="helpful-sft: spec.models.actor.parallelism.tensor: is 4, which does not divide the model's 2 key…",
        remedy="Take a divisor of the model's heads, or more pipeline stages or data parallelism.",
    ),
    "a model that is not there": Mistake(
        how="before Ray",
        sets=("models.actor.uri=file:///nowhere",),
        code=DATA,
        sentence="helpful-sft: spec.models.actor.uri: file:///nowhere…",
        remedy="Correct the path; a relative `file://` starts at the manifest.",
    ),
    "an output that cannot be written": Mistake(
        how="before Ray",
        options=("--output", __file__),
        code=ENVIRONMENT,
        sentence="--output …: cannot be written: File exists",
    ),
    "a Ray that does not answer": Mistake(
        how="before Ray",
        options=("--address", "127.0.0.1:9"),
        code=ENVIRONMENT,
        sentence="--address or RAY_ADDRESS 127.0.0.1:9: no Ray answers there: …",
        remedy="Start that Ray, or leave `--address` and `RAY_ADDRESS` out to get one of its own.",
    ),
}
RUNS: dict[str, Mistake] = {
    "a data set that is not there": Mistake(
        sets=("data.train.uri=file://no.jsonl",),
        code=DATA,
        sentence="helpful-sft: spec.data.train.uri: file://…/no.jsonl: there is no file or folder …/no.jsonl",
        remedy="Correct the path; a relative `file://` starts at the manifest.",
    ),
    "a column that is missing": Mistake(
        sets=("data.train.promptKey=nope",),
        code=DATA,
        sentence="helpful-sft: spec.data.train.promptKey: package://… has no column 'nope'; its columns are …",
    ),
    "an empty data file": Mistake(
        prepare=file("rows.jsonl", ""),
        sets=("data.train.uri=file://rows.jsonl",),
        code=DATA,
        sentence="helpful-sft: spec.data.train.uri: …/rows.jsonl is empty",
    ),
    "a critic with another vocabulary": Mistake(
        manifest=PPO.replace('critic: {uri: "file://models/reward"}', 'critic: {uri: "file://other"}'),
        prepare=relabelled,
        sets=(),
        code=SPEC,
        sentence="ppo: spec.models.critic: its tokenizer is not the actor's (…)",
        remedy="Start the critic from a model with the actor's tokenizer.",
    ),
    "prompts longer than the model": Mistake(
        manifest=PPO,
        sets=("data.maxPromptTokens=600",),
        code=SPEC,
        sentence="ppo: spec.data: maxPromptTokens + maxResponseTokens is 608; the model … reads 512 tokens at most",
    ),
    "a reward model with two labels": Mistake(
        manifest=PPO.replace('reward: {uri: "file://models/reward"}', 'reward: {uri: "file://models/labels"}'),
        sets=(),
        code=SPEC,
        sentence="ppo: spec.models.reward: … has 2 labels; say by label which of them is the score, from 0 to 1",
    ),
    "weights that are a pickle": Mistake(
        prepare=pickled,
        sets=("models.actor.uri=file://pickled",),
        code=DATA,
        sentence="…pytorch_model.bin: pickled weights are never opened, for they can run code; save as safetensors",
    ),
    "a disk that is too small": Mistake(
        disk="10m",
        options=("--output", "{folder}/disk/run"),
        code=ENVIRONMENT,
        sentence="helpful-sft: spec.checkpoint: checkpoints and model take …, but … has … free",
        remedy="Free some space, choose another `checkpoint.storage`, or lower `checkpoint.keepLast`.",
    ),
    "no disk space for the metrics": Mistake(
        disk="64m",
        manifest=PPO,
        options=("--output", "{folder}/disk/run", FILLS_THE_DISK),
        sets=(),
        code=ENVIRONMENT,
        sentence="…/disk/run/ppo…: cannot be written: No space left on device",
    ),
    "a Ray that cannot start": Mistake(
        environment={"RAY_TMPDIR": "/proc/nowhere"},
        code=ENVIRONMENT,
        sentence="Ray cannot start: …",
        remedy="Set `RAY_TMPDIR` (default `/tmp`) to a folder that can be written.",
    ),
    "a package that is not installed": Mistake(
        prepare=file("torch.py", 'raise ModuleNotFoundError("No module named torch", name="torch")\n'),
        environment={"PYTHONPATH": "{folder}"},
        code=ENVIRONMENT,
        sentence="the Python package … is not installed",
    ),
    "no memory for vLLM's cache": Mistake(
        manifest=PPO.replace("file://models/language", "file://long"),
        prepare=long_model,
        sets=("data.maxResponseTokens=80000000",),
        code=ExitCode.OUT_OF_MEMORY,
        sentence="spec.data.maxResponseTokens: vLLM's cache for … responses of … tokens with their prompts takes …",
        remedy="Shorten the responses; on GPUs raise `spec.rollout.gpuMemoryUtilization`, which the message names.",
    ),
    "a loss that is not finite": Mistake(
        sets=(*ENDLESS, "models.actor.optimizer={learningRate: 1e30}", "training.maxSkippedUpdates=2"),
        code=ExitCode.NUMERICS,
        sentence="helpful-sft: spec.models.actor: step 4: the … is nan, and 3 updates in a row failed, more than "
        "the 2 of spec.training.maxSkippedUpdates; a lower optimizer.learningRate (1e+30) is the usual remedy",
        remedy="Lower the learning rate or lengthen its warm-up; the metric `skipped_updates` counts single ones.",
    ),
    "an evaluation function that raises": Mistake(
        manifest=PPO
        + "  evaluation:\n    data: {uri: package://rlhf_examples/helpful/heldout.jsonl, limit: 4}\n"
        + '    functions: [{name: rule, entrypoint: "os:abort_everything"}]\n',
        sets=(),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.evaluation.functions: os:abort_everything cannot be imported: AttributeError: …",
    ),
    "an own step that calls what is not there": Mistake(
        manifest=PPO.replace('    critic: {uri: "file://models/reward"}\n', ""),
        prepare=file("own_step.py", OWN.replace("helper.help(", "helper.hlep(")),
        sets=("algorithm={name: Custom, entrypoint: 'own_step:Own', options: {kl: {coefficient: 0}}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.algorithm.entrypoint: helper has no method hlep; did you mean help? (…/own_step.py:17)",
    ),
    "an own step that reads a field that nobody adds": Mistake(
        manifest=PPO.replace('    critic: {uri: "file://models/reward"}\n', ""),
        prepare=file("own_read.py", OWN.replace('reads=("scores",)', 'reads=("costs",)')),
        sets=("algorithm={name: Custom, entrypoint: 'own_read:Own', options: {kl: {coefficient: 0}}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.algorithm.entrypoint: helper.help (…/own_read.py:7) reads costs; the batch holds … "
        "(…/own_read.py:17)",
    ),
    "an own worker that raises": Mistake(
        manifest=PPO.replace('    critic: {uri: "file://models/reward"}\n', ""),
        prepare=file("own_worker.py", OWN.replace("/ 1", "/ None")),
        sets=("algorithm={name: Custom, entrypoint: 'own_worker:Own', options: {kl: {coefficient: 0}}}",),
        code=ExitCode.USER_CODE,
        sentence="helper.help on rank 0: TypeError: unsupported operand type(s) for /: 'Tensor' and 'NoneType' "
        "(…/own_worker.py:9)",
    ),
    "an own advantage of another shape": Mistake(
        manifest=PPO.replace('    critic: {uri: "file://models/reward"}\n', ""),
        prepare=file("own_shape.py", OWN.replace("return returns", "return returns[:1]")),
        sets=("algorithm={name: Custom, entrypoint: 'own_shape:Own', options: {kl: {coefficient: 0}}}",),
        code=ExitCode.USER_CODE,
        sentence="advantage.compute_advantage on rank 0: ValueError: the advantage has the shape [1], expected a "
        "tensor [4, …], or [N] with a number for each response of all ranks (…/own_shape.py:20)",
        remedy="Return a number for each response of the step, or for each token of those that are given.",
    ),
    "a reward function that raises": Mistake(
        manifest=PPO,
        sets=(f"models.reward={{entrypoint: '{FUNCTIONS}:always_raises'}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.models.reward: …:always_raises raised ZeroDivisionError: nothing to divide by "
        "(…:…); the sample is …, prompt …, response …",
        remedy="Try the function on that sample; the message names the line that raised.",
    ),
    "a reward function that never returns": Mistake(
        manifest=PPO,
        sets=(f"models.reward={{entrypoint: '{FUNCTIONS}:always_sleeps', timeoutSeconds: 2}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.models.reward: …:always_sleeps did not return within 2 s; the sample is …",
        remedy="Try the function on that sample. If it needs more time, raise `timeoutSeconds`.",
    ),
    "a reward function whose process is killed": Mistake(
        manifest=PPO,
        sets=(f"models.reward={{entrypoint: '{FUNCTIONS}:always_is_killed'}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.models.reward: …:always_is_killed was ended by signal 9 (SIGKILL); the sample is …",
        remedy="Try the function on that sample; signal 9 often means that memory was short.",
    ),
    "a reward function that returns too little": Mistake(
        manifest=PPO,
        sets=(f"models.reward={{entrypoint: '{FUNCTIONS}:one_for_all'}}",),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.models.reward: …:one_for_all returned 1 values for … responses (…:…); "
        "no sample does it by itself, the first of the … is row 0 of step 1, …",
    ),
    "an environment that cannot be made": Mistake(
        manifest=PPO,
        prepare=file("own_game.py", "class Game:\n    def __init__(self, *, turns): ...\n"),
        sets=("rollout.environment={entrypoint: 'own_game:Game', arguments: {turn: 2}}", "rollout.maxTurns=2"),
        code=ExitCode.USER_CODE,
        sentence="ppo: spec.rollout.environment: own_game:Game __init__ raised TypeError: Game.__init__() got an "
        "unexpected keyword argument 'turn' (…/own_game.py:1)",
    ),
    "a reward service that does not answer": Mistake(
        manifest=PPO,
        sets=("models.reward={url: 'http://127.0.0.1:9/score', attempts: 2}",),
        code=ENVIRONMENT,
        sentence="ppo: spec.models.reward: http://127.0.0.1:9/score cannot be reached: ConnectError (2 attempts); "
        "the sample is …",
        remedy="Start the service, or allow it more `attempts`.",
    ),
    "a judge that does not answer": Mistake(
        manifest=PPO,
        sets=("models.reward={judge: {url: 'http://127.0.0.1:9/v1', model: m, prompt: '{response}', attempts: 2}}",),
        code=ENVIRONMENT,
        sentence="ppo: spec.models.reward.judge: http://127.0.0.1:9/v1/chat/completions cannot be reached: "
        "ConnectError (2 attempts); the sample is …",
    ),
    "a token that is not there": Mistake(
        manifest=PPO,
        sets=("models.reward={url: 'http://127.0.0.1:9/score', tokenVariable: NO_SUCH_TOKEN}",),
        code=ENVIRONMENT,
        sentence="ppo: spec.models.reward.tokenVariable: the environment variable NO_SUCH_TOKEN is not set",
    ),
}
BY_A_FAULT: dict[str, Mistake] = {
    "a worker that dies": Mistake(
        code=ExitCode.COMMUNICATION,
        sentence="…; rank … of pool …, process … died in …; the stacks of all ranks are in …/stacks.txt",
        remedy="See the machine's log: the kernel may have ended it because memory was short.",
    ),
    "a worker that hangs": Mistake(
        code=ExitCode.COMMUNICATION,
        sentence="no call of a worker ended within … s; rank … of pool …, process … does not answer in …; "
        "the stacks of all ranks are in …/stacks.txt",
        remedy="Read the stacks. If a call needs more time, raise `spec.training.callDeadlineSeconds`.",
    ),
    "a worker without memory": Mistake(
        code=ExitCode.OUT_OF_MEMORY,
        sentence="… on rank … has not enough memory (CUDA out of memory. Tried to allocate …); lower spec.…",
        remedy="Lower the field that the message names; `training.microBatchTokens` changes results only by rounding.",
    ),
    "no disk space for a checkpoint": Mistake(
        code=ENVIRONMENT,
        sentence="…/ppo/checkpoints/step-00000…: the checkpoint cannot be written: …No space left on device…",
        remedy="Free some space, choose another `checkpoint.storage`, or lower `checkpoint.keepLast`.",
    ),
    "a Ray that ends": Mistake(
        code=ENVIRONMENT,
        sentence="Ray has ended: its … was ended by SIGKILL",
        remedy="Run it again; see the machine's log: the kernel may have ended it because memory was short.",
    ),
    "a checkpoint that is damaged": Mistake(
        code=ExitCode.NUMERICS,
        sentence="…/checkpoints/…: … is not what was written (checksum); a run goes on from the checkpoint before it, "
        "or from the start",
        remedy="Run it again. If it happens again, suspect the disk or the memory of the machine.",
    ),
    "data that change between two runs": Mistake(
        code=DATA,
        sentence="ppo: spec.data.train: its rows, or their order, are not those with which the job began; "
        "use another --output, or --restart",
    ),
}
OF_A_SERVER: dict[str, Mistake] = {
    "a server of `rollout.endpoints` that cannot be reached": Mistake(
        code=ENVIRONMENT,
        sentence="…: spec.rollout.endpoints[…]: … cannot be reached: …",
    ),
    "a server that serves another model": Mistake(
        code=SPEC,
        sentence="…: spec.rollout.endpoints[…]: … serves another model: … is … there, and … in the actor",
    ),
    "a server that computes in another type": Mistake(
        code=SPEC,
        sentence="…: spec.rollout.endpoints[…]: … computes with dtype …; start it with --dtype …",
    ),
    "a server with log-probabilities of other distributions": Mistake(
        code=SPEC,
        sentence="…: spec.rollout.endpoints[…]: … computes with logprobs_mode …; "
        "start it with --logprobs-mode processed_logprobs",
    ),
    "a server without an option that it needs": Mistake(
        code=SPEC,
        sentence="…: spec.rollout.endpoints[…]: … answered 404 Not Found to POST …; start it with …",
        remedy="Start the server as [rollouts](rollouts.md#engines-that-run-elsewhere) says.",
    ),
    "no server is left": Mistake(
        code=ENVIRONMENT,
        sentence="…: spec.rollout.endpoints: no server is left that generates (…)",
        remedy="Start the servers and run it again; it goes on from its checkpoint.",
    ),
}
MISTAKES = {**VALIDATE, **PLAN, **BEFORE_RAY, **RUNS, **BY_A_FAULT, **OF_A_SERVER}


KINDS = {
    SPEC: "the manifest or the command",
    DATA: "data or model",
    ENVIRONMENT: "device, disk, Ray or a service",
    ExitCode.OUT_OF_MEMORY: "memory",
    ExitCode.NUMERICS: "numbers",
    ExitCode.USER_CODE: "your code",
    ExitCode.COMMUNICATION: "a worker",
}


def messages() -> str:
    """docs/messages.md: by exit code, the messages that need a remedy."""
    return HEAD + "".join(map(_table, KINDS))


HEAD = """\
# Messages

For readers who met an error of a run. Most messages say what to do; these need more
([troubleshooting](troubleshooting.md) has the rest). `…` stands for text that varies. The tests cause each
of them; `python -m tests.trainer.chain.mistakes > docs/messages.md` writes this page.
"""


def _table(code: ExitCode) -> str:
    rows = (
        f"| `{mistake.sentence}` | {mistake.remedy} |\n"
        for mistake in MISTAKES.values()
        if mistake.code == code and mistake.remedy
    )
    return f"\n## Exit code {int(code)}: {KINDS[code]}\n\n| message | what to do |\n|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    print(messages(), end="")  # noqa: T201 it is what this is for
