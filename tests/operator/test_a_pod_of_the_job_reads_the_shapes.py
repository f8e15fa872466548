"""Shapes that the operator cannot read: a pod of the job's own reads them once, and only then the job is mapped."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.status import ReadShape
from rlhf_operator import names
from rlhf_operator.placement.map_job import map_job
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.resources import reader
from rlhf_operator.resources.identity import fixed_part
from rlhf_operator.snapshot import ObservedClaim, ObservedContainer, Refusal, Snapshot
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, nodes, snapshot, variables
from tests.operator.simulated import SFT, World
from tests.operator.test_a_job_lives_its_life import PPO_LIKE, first, message, reason

HUB = "hf://org/model"
SMALL = {"hiddenSize": 64, "numHiddenLayers": 2, "numAttentionHeads": 4, "intermediateSize": 128, "vocabSize": 512}
READ = json.dumps([{"shape": SMALL}])
LARGE = {"name": "llama-3-70b"}
ROLES = ("actor", "critic", "reference", "reward")


def reading(**model: Any) -> World:
    """A job whose model is on the hub, and whose pods are about to be asked."""
    world = World(spec={**SFT, "models": {"actor": {"uri": HUB, **model}}})
    world.settle()
    return world


def test_nothing_is_mapped_before_the_shapes_are_read() -> None:
    world = reading(revision="main")
    assert (world.phase, reason(world, "Mapped"), world.made) == ("Mapping", "ReadingShapes", [])
    assert HUB in message(world, "Mapped")
    assert [(each.kind, each.reason) for each in world.events] == [("Normal", "ReadingShapes")], "nobody has to act"
    assert world.asked == [[[HUB, "main"]]]
    world.told(READ)
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("Mapped", ["job-a1"])
    assert world.status.mapping
    assert world.status.mapping.predicted_step_seconds


def test_what_was_read_is_not_read_again() -> None:
    world = reading()
    world.edit(runPolicy={"failureRules": [{"name": "all", "action": "Remap"}]})
    world.told(READ)
    world.settle()
    (read,) = world.status.shapes
    assert (read.uri, read.revision, read.problem) == (HUB, None, None)
    assert read.shape
    assert read.shape.hidden_size == 64
    world.readers.clear()
    world.restart_operator()
    world.run_to(12)
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    assert (len(world.made), len(world.asked)) == (2, 1)


def test_a_shape_in_the_manifest_needs_no_reading() -> None:
    world = reading(shape=SMALL)
    assert (reason(world, "Mapped"), world.asked, world.status.shapes) == ("Mapped", [], ())


def test_each_model_is_read_once_where_the_trainer_would_find_it() -> None:
    models = {role: {"uri": "pvc://models/llama 7b"} for role in ("actor", "reward")}
    spec = {
        **SFT,
        "algorithm": {"name": "PPO"},
        "models": {**models, "critic": {"uri": "job://first"}},
        "training": {"totalSteps": 3, "promptBatchSize": 4},
    }
    world = World(spec=spec, claims={name: ObservedClaim(name=name) for name in ("models", "first-output")})
    maker = {**PPO_LIKE, "models": {"reward": {"uri": "hf://org/base", "revision": "v2"}}}
    world.inputs["first"] = first(phase="Succeeded", output_uri="pvc://first-output/first/model", spec=maker)
    world.settle()
    assert sorted(world.asked[0]) == [
        ["file:///rlhf/claims/models/llama%207b", None],
        ["file:///rlhf/inputs/first/first/model", "v2"],
    ]
    world.told(json.dumps([{"shape": SMALL}] * 2))
    world.settle()
    assert reason(world, "Mapped") == "Mapped"
    assert {(each.uri, each.revision) for each in world.status.shapes} == {
        ("pvc://models/llama 7b", None),
        ("hf://org/base", "v2"),
    }


def test_what_cannot_be_read_is_told_and_the_job_runs() -> None:
    world = reading()
    world.told(json.dumps([{"problem": "its config.json cannot be fetched: 401"}]))
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("ShapesUnknown", ["job-a1"])
    assert f"spec.models.actor.uri: {HUB}: its config.json cannot be fetched: 401" in message(world, "Mapped")


def test_on_gpus_nothing_is_placed_without_a_shape() -> None:
    job = {**SFT, "models": {"actor": {"uri": HUB}}, "resources": {"device": "GPU", "slotsPerNode": 8}}
    world = World(spec=job, nodes=nodes(1, 8, A100))
    world.settle()
    world.told(json.dumps([{"problem": "its config.json cannot be fetched: 503 Service Unavailable"}]))
    world.settle()
    world.wait(60)
    world.settle()
    assert (world.phase, reason(world, "Mapped"), world.made) == ("Mapping", "ShapesUnknown", [])
    assert message(world, "Mapped") == (
        f"spec.models.actor.uri: {HUB}: its config.json cannot be fetched: 503 Service Unavailable; "
        "put that right, or write spec.models.actor.shape, or place by hand"
    )
    assert len(world.asked) == 1, "the Job is still there"
    world.readers.clear()
    world.settle()
    assert (reason(world, "Mapped"), len(world.asked)) == ("ReadingShapes", 2)
    world.told(READ)
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("Mapped", ["job-a1"])


def test_what_could_not_be_read_is_tried_for_another_mapping() -> None:
    world = reading()
    world.edit(runPolicy={"failureRules": [{"name": "all", "action": "Remap"}]})
    world.told(json.dumps([{"problem": "the hub does not answer"}]))
    world.run_to(12)
    (before,) = world.readers
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    assert (reason(world, "Mapped"), len(world.asked)) == ("ReadingShapes", 2), "another Job, while the first is there"
    del world.readers[before]
    world.told(READ)
    world.settle()
    assert (reason(world, "Mapped"), len(world.made)) == ("Mapped", 2)


@each_case(
    "words",
    [
        "",
        "nonsense",
        "{}",
        "[]",
        "[1]",
        "[{}]",
        "[" * 4000,
        json.dumps([{"shape": SMALL}] * 2),
        json.dumps([{"shape": {"hiddenSize": "wide"}}]),
        json.dumps([{"shape": {**SMALL, "unheardOf": 1}}]),
        json.dumps([{"problem": "", "weightBytes": 10**30}]),
        json.dumps([{"problem": "\ud800"}]),
        json.dumps([{"shape": {}}]),
        json.dumps([{"shape": {**SMALL, "numAttentionHeads": 3}}]),
        json.dumps([{"shape": {**SMALL, "modelType": "t5"}}]),
    ],
)
def test_whatever_the_pod_says_the_job_goes_on(words: str) -> None:
    world = reading()
    world.told(words)
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("ShapesUnknown", ["job-a1"])
    assert "cannot be read" in message(world, "Mapped")


@pytest.mark.parametrize(
    ("words", "fields", "why"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'rlhf_trainer'\n", {}, "No module named 'rlhf_trainer'"),
        ("", {"reason": "DeadlineExceeded", "message": "Pod was active too long"}, "Pod was active too long"),
        ("", {"containers": ()}, "it does not say why"),
    ],
)
def test_a_pod_that_fails_leaves_the_shapes_unknown(words: str, fields: dict[str, Any], why: str) -> None:
    world = reading()
    world.told(words, phase="Failed", **fields)
    world.settle()
    assert reason(world, "Mapped") == "ShapesUnknown"
    assert f"failed: {why}" in message(world, "Mapped").replace("ModuleNotFoundError: ", "")


def test_what_is_beside_the_reader_hides_none_of_its_words() -> None:
    world = reading()
    (pod,) = world.readers
    beside = ObservedContainer(name="istio-proxy", running=True)
    said = ObservedContainer(name=names.READER, exit_code=0, last_words=READ)
    world.readers[pod] = replace(world.readers[pod], phase="Running", containers=(beside, said))
    world.settle()
    assert reason(world, "Mapped") == "Mapped"


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_pod_says_is_told_in_one_line_without_credentials(fails: bool) -> None:
    why = "GET https://me:secret@hub.example.com/org\0 failed"
    world = reading()
    if fails:
        world.told(f"Traceback\n{why}", phase="Failed")
    else:
        world.told(json.dumps([{"problem": f"first\n{why} {'ü' * 300}"}]))
    world.settle()
    assert "GET https://hub.example.com/org failed" in message(world, "Mapped")
    assert "secret" not in str(world.status.document())
    assert message(world, "Mapped").isprintable()
    assert message(world, "Mapped").count("ü") < 150, "it is cut by its bytes"


def test_a_reader_on_a_lost_node_does_not_hold_up_the_job() -> None:
    world = World(spec={**SFT, "models": {"actor": {"uri": HUB}}}, nodes=nodes(1))
    world.settle()
    (pod,) = world.readers
    world.readers[pod] = replace(world.readers[pod], node="lost", deleting_since=world.now)
    world.settle()
    assert (reason(world, "Mapped"), len(world.asked)) == ("ReadingShapes", 2)


def test_a_reader_in_a_queue_waits_for_it() -> None:
    world = World(spec={**SFT, "models": {"actor": {"uri": HUB}}}, labels={names.QUEUE: "team"})
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    (mapped,) = (each for each in plan.status.conditions if each.type == "Mapped")
    assert mapped.message.endswith("Queue team has to admit it first.")


def test_a_pod_whose_node_was_taken_has_said_nothing() -> None:
    world = reading()
    world.told("", phase="Failed", disruption="DeletionByTaintManager")
    world.settle()
    assert (reason(world, "Mapped"), world.status.shapes) == ("ReadingShapes", ())
    world.readers.clear()  # with its Job, when that has been there for its time
    world.settle()
    assert len(world.asked) == 2


def test_what_keeps_the_pod_from_reading_is_told() -> None:
    world = reading()
    (pod,) = world.readers
    waiting = ObservedContainer(
        name=names.READER, waiting_reason="CreateContainerConfigError", waiting_message='secret "hub" not found'
    )
    world.readers[pod] = replace(world.readers[pod], containers=(waiting,))
    world.settle()
    assert f'pod {pod}: secret "hub" not found' in message(world, "Mapped")


def test_a_pod_that_is_slow_to_start_is_told_with_its_event() -> None:
    world = reading()
    (pod,) = world.readers
    waiting = ObservedContainer(name=names.READER, waiting_reason="ContainerCreating")
    world.readers[pod] = replace(world.readers[pod], containers=(waiting,))
    world.complaint = "MountVolume.SetUp failed for volume hub: timed out"
    world.settle()
    assert world.complaint not in message(world, "Mapped")
    world.wait(60)
    world.settle()
    assert message(world, "Mapped").endswith(f"waits (ContainerCreating): {world.complaint}")


def test_a_reader_that_is_refused_is_told() -> None:
    world = World(spec={**SFT, "models": {"actor": {"uri": HUB}}})
    refused = Refusal(reason="CreateRefused", message="Job job-shapes was refused: exceeded quota")
    plan = decide(replace(world.observe(fresh=True), refused=refused), world.now, world.settings)
    (mapped,) = (each for each in plan.status.conditions if each.type == "Mapped")
    assert (mapped.reason, mapped.message) == ("ReadingShapes", refused.message)


PPO_70B = {
    **{f"models.{role}.uri": HUB for role in ROLES},
    "resources.device": "GPU",
    "resources.slotsPerNode": 8,
}


def read(*shapes: ReadShape, **changes: Any) -> Snapshot:
    """PPO whose models have been read so."""
    found = snapshot(changed("helpful-ppo", PPO_70B | changes), nodes(1, 8, A100))
    return replace(found, job=replace(found.job, status=found.job.status.model_copy(update={"shapes": shapes})))


def test_models_of_the_hub_are_mapped_or_refused_as_any_other() -> None:
    job = changed("helpful-ppo", PPO_70B)
    told = changed("helpful-ppo", PPO_70B | {f"models.{role}.shape": LARGE for role in ROLES})
    shape = ReadShape.model_validate({"uri": HUB, "shape": LARGE})
    for answer in (map_job(job, read(shape), SETTINGS), map_job(told, snapshot(told, nodes(1, 8, A100)), SETTINGS)):
        assert (answer.reason, answer.mapping) == ("NoFeasiblePlacement", None)
        assert "x a100-80g" in answer.message
        assert "would do" in answer.message


@pytest.mark.parametrize(("size", "fits"), [(140_000_000_000, False), (2_000_000_000, True), (None, True)])
def test_what_could_not_fit_by_its_weights_alone_is_not_placed(size: int | None, fits: bool) -> None:
    shape = ReadShape(uri=HUB, problem="config.json has no hidden_size", weight_bytes=size)
    on_cpu = PPO_70B | {"resources.device": "CPU", "resources.slotsPerNode": 1}
    answer = map_job(changed("helpful-ppo", on_cpu), read(shape, **on_cpu), SETTINGS)
    assert answer.reason == ("ShapesUnknown" if fits else "NoFeasiblePlacement")
    assert "has no hidden_size" in answer.message
    assert ("take at least 1,120.0 GB, but 1 x cpu-slot hold 63.2 GB" in answer.message) is not fits


def test_a_shape_that_cannot_be_is_the_manifest_s_mistake() -> None:
    job = changed("helpful-ppo", {"models.actor.shape": {**SMALL, "numAttentionHeads": 3}})
    answer = map_job(job, snapshot(job, nodes(1)), SETTINGS)
    assert answer.reason == "InvalidPlacement"
    assert answer.message == (
        "spec.models.actor.shape: num_attention_heads is 3, which does not divide hidden_size, 64"
    )


def test_a_reader_has_the_rights_of_the_job_s_pods_and_no_others() -> None:
    runtime = {
        "image": "example.com/trainer:1",
        "imagePullSecrets": ["registry"],
        "serviceAccountName": "trainer",
        "controller": {
            "template": {
                "metadata": {"labels": {"team": "a"}},
                "spec": {"priorityClassName": "high", "containers": [{"name": "mine", "image": "x"}]},
            }
        },
        "env": [{"name": "HF_TOKEN", "secret": {"name": "hub", "key": "token"}}],
    }
    job = changed("helpful-ppo", {"models.actor.uri": "pvc://models/llama", "runtime": runtime})
    seen = snapshot(job, labels={names.QUEUE: "team", "other": "label"})
    made = reader.manifest(seen, job, SETTINGS, [("pvc://models/llama", None)])
    assert (made["kind"], made["metadata"]["name"]) == ("Job", reader.name(seen, job, [("pvc://models/llama", None)]))
    assert made["metadata"]["ownerReferences"][0]["uid"] == seen.job.uid
    assert made["metadata"]["labels"][names.QUEUE] == "team"
    template = made["spec"]["template"]
    assert (template["metadata"]["labels"][names.ROLE], names.ATTEMPT in template["metadata"]["labels"]) == (
        names.READER,
        False,
    )
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("trainer", [{"name": "registry"}])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (template["metadata"]["labels"]["team"], pod["priorityClassName"]) == ("a", "high")
    (container,) = pod["containers"]
    assert container["image"] == "example.com/trainer:1"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert variables(container)["HOME"] == "/tmp"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert sorted(claims) == ["helpful-rm-output", "helpful-sft-output", "models"], "the job's own is not there yet"
    assert all(each.get("readOnly") for each in container["volumeMounts"] if each["name"].startswith("claim-"))


OWN = {
    "algorithm": {"name": "Custom", "entrypoint": "my_algo:Mine", "options": {"shrink": 0.5}},
    "models": {role: {"uri": HUB, "shape": SMALL} for role in ("actor", "reward")},
    "data": {"train": {"uri": "hf://x"}},
    "training": {"totalSteps": 3, "promptBatchSize": 4},
    "resources": {"device": "CPU", "slotsPerNode": 1},
}
STEP = {
    "base": "PolicyGradient",
    "data": "prompts",
    "models": ["actor", "reward", "advantage"],
    "calls": ["actor.generate_sequences", "reward.compute_reward", "advantage.compute_advantage", "actor.update_actor"],
}


@pytest.mark.parametrize(
    "placement",
    [{}, {"mode": "Manual", "pools": [{"name": "a", "models": ["actor", "reward"], "slotsPerNode": 1}]}],
)
def test_an_own_algorithm_is_read_in_the_image_then_mapped(placement: dict[str, Any]) -> None:
    world = World(spec={**OWN, "placement": placement})
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("ReadingShapes", [])
    assert "the algorithm my_algo:Mine" in message(world, "Mapped")
    assert world.asked == [{"entrypoint": "my_algo:Mine", "options": {"shrink": 0.5}}]
    world.told(json.dumps(STEP))
    world.settle()
    assert (reason(world, "Mapped"), world.made) == ("ManualPlacement" if placement else "Mapped", ["job-a1"])
    assert world.status.mapping
    assert {each.role for each in world.status.mapping.sizes} == {"actor", "reward"}
    assert world.status.mapping.predicted_step_seconds
    world.readers.clear()
    world.restart_operator()
    world.run_to(2)
    assert (world.phase, len(world.asked)) == ("Running", 1)


def test_what_the_step_needs_is_asked_of_the_spec() -> None:
    spec = {**OWN, "models": {**OWN["models"], "critic": {"uri": HUB, "shape": SMALL}}}  # type: ignore[dict-item]
    world = World(spec=spec)
    world.settle()
    world.told(json.dumps(STEP))
    world.settle()
    assert reason(world, "Accepted") == "InvalidSpec"
    assert message(world, "Accepted") == "spec.models.critic: Custom has no critic; it uses actor or reward"


@each_case(
    ("words", "sentence"),
    [
        ('{"problem": "spec.algorithm.entrypoint: my_algo:Mine cannot be imported"}', "cannot be imported"),
        ('{"base": "Other"}', "job-shapes-"),
        ('{"base": "Algorithm", "data": "prompts", "models": ["advantage"], "calls": []}', "job-shapes-"),
        ("[]", "could not read it: []"),
    ],
)
def test_an_algorithm_that_cannot_be_read_fails_the_job(words: str, sentence: str) -> None:
    world = World(spec=OWN)
    world.settle()
    world.told(words)
    world.settle()
    assert (world.phase, reason(world, "Failed")) == ("Failed", "InvalidInput")
    assert sentence in message(world, "Failed")


def test_the_pod_has_the_code_that_a_volume_holds() -> None:
    code = {"name": "code", "mountPath": "/code"}
    template = {
        "spec": {
            "containers": [{"name": "ray-head", "volumeMounts": [code]}],
            "volumes": [{"name": "code", "configMap": {"name": "my-algo"}}],
        }
    }
    runtime = {"env": [{"name": "PYTHONPATH", "value": "/code"}], "controller": {"template": template}}
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "job"},
        "spec": {**OWN, "runtime": runtime},
    }
    job = Job.parse(document)
    asked = {"entrypoint": "my_algo:Mine", "options": {}}
    pod = reader.manifest(snapshot(job), job, SETTINGS, asked)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert code in container["volumeMounts"]
    assert len(container["volumeMounts"]) > 1
    assert {"name": "code", "configMap": {"name": "my-algo"}} in pod["volumes"]
    assert {"name": "PYTHONPATH", "value": "/code"} in container["env"]
    assert container["resources"] == fixed_part("reader_container")["resources"]
