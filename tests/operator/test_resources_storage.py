"""Where the folders of a job are in its pods, and what its URIs are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf_api import kubectl_yaml
from rlhf_api.checks.resume import changes, identity
from rlhf_api.job import Job
from rlhf_operator.resources import storage
from rlhf_operator.snapshot import claims_named
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, example_jobs, groups, head, made, mapped, nodes, pod_of

PPO = "helpful-ppo"
CPUS = nodes(1)


def given(job: Job, there: Any = CPUS, **more: Any) -> dict[str, Any]:
    """The document in the ConfigMap."""
    (document,) = kubectl_yaml.read(made(job, there, **more)["ConfigMap"]["data"]["job.yaml"], "")
    assert isinstance(document, dict)
    return document


def mounted(job: Job) -> dict[str, tuple[str, str, bool]]:
    """Folder -> claim, path in it, read-only; the same in head and workers."""
    rayjob = made(job, CPUS)["RayJob"]
    found = [_claims(pod_of(group)) for group in (head(rayjob), *groups(rayjob).values())]
    assert all(each == found[0] for each in found)
    return found[0]


def _claims(pod: dict[str, Any]) -> dict[str, tuple[str, str, bool]]:
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert len(set(claims.values())) == len(claims), "one volume a claim"
    return {
        each["mountPath"]: (claims[each["name"]], each.get("subPath", ""), each.get("readOnly", False))
        for each in pod["containers"][0]["volumeMounts"]
        if each["name"] in claims
    }


def one_of_each_algorithm() -> Iterable[str]:
    """The last example of each algorithm, by name."""
    return {job.spec.algorithm.name: name for name, job in example_jobs().items()}.values()


@each_case("there", [CPUS, nodes(2, 8, A100), None], ids=["cpu", "gpu", "unseen"])
@each_case("name", one_of_each_algorithm)
def test_the_job_file_of_each_algorithm_is_right(name: str, there: Any) -> None:
    job = changed(name, {"resources.device": "CPU"} if there is None else {})
    document = given(job, there)
    mapping, parsed = mapped(job, there), Job.parse(document)
    assert parsed.spec.placement.mode == "Manual"
    assert parsed.spec.resources.device == mapping.device
    pools = [(pool.name, pool.models, pool.nodes, pool.slots_per_node) for pool in parsed.spec.placement.pools]
    assert pools == [(pool.name, pool.models, pool.nodes, pool.slots_per_node) for pool in mapping.pools]
    merges = job.spec.algorithm.name == "Merge"  # it names no model by role, and has one slot on any nodes
    for sizes in () if merges else mapping.sizes:
        cut = parsed.models()[sizes.role].parallelism
        assert cut
        assert (cut.pipeline, cut.tensor, cut.data) == (sizes.pipeline, sizes.tensor, sizes.data)
    assert "job://" not in str(document)
    assert not {"suspend", "runPolicy", "runtime"} & document["spec"].keys()


@each_case("name", one_of_each_algorithm)
def test_an_attempt_on_other_nodes_is_the_same_experiment(name: str) -> None:
    job = example_jobs()[name]
    first, second = given(job), given(job, nodes(4, 8, A100), attempt=2)
    resolved = [Job.parse(each).model_dump(mode="json", by_alias=True) for each in (first, second)]
    assert first != second or job.spec.algorithm.name == "Merge"
    assert changes(*resolved) == []
    assert identity(resolved[0], {}) == identity(resolved[1], {})


def test_the_manifest_stays_where_the_mapping_is_silent() -> None:
    spec = {"rollout.temperature": 0.7, "training.seed": 5, "models.actor.offload": "All"}
    document = given(changed(PPO, spec))
    assert document["spec"]["rollout"]["temperature"] == 0.7
    assert document["spec"]["training"]["seed"] == 5
    assert document["spec"]["models"]["actor"]["offload"] == "All"
    assert document["spec"]["training"]["microBatchTokens"] is None


def test_a_value_that_was_switched_off_stays_off() -> None:
    document = given(changed(PPO, {"algorithm.valueClipRange": None}))
    assert document["spec"]["algorithm"]["valueClipRange"] is None
    assert Job.parse(document).spec.algorithm == changed(PPO, {"algorithm.valueClipRange": None}).spec.algorithm


def test_on_gpus_the_trainer_is_told_what_fits_into_their_memory() -> None:
    document = given(example_jobs()[PPO], nodes(2, 8, A100))
    assert 0 < document["spec"]["rollout"]["gpuMemoryUtilization"] < 1
    assert document["spec"]["training"]["microBatchTokens"] < 16384
    assert document["spec"]["rollout"]["tensorParallel"] == 1


def test_on_gpus_the_mapping_says_which_models_recompute() -> None:
    def told(there: Any, changes: dict[str, Any]) -> list[Any]:
        models = given(changed(PPO, changes), there)["spec"]["models"]
        return [models[role].get("gradientCheckpointing") for role in ("actor", "critic", "reward")]

    gpus = nodes(2, 8, A100)
    assert told(gpus, {}) == [False, False, None], "small models keep what they computed"
    assert told(gpus, {"models.critic.gradientCheckpointing": True}) == [False, True, None]
    assert told(CPUS, {}) == [None, None, None]


def test_the_reference_is_written_down_with_sizes_of_its_own() -> None:
    job = changed(PPO, {"models.reference": None, "models.actor.offload": "All"})
    reference = given(job)["spec"]["models"]["reference"]
    assert reference["uri"] == given(job)["spec"]["models"]["actor"]["uri"]
    assert reference["offload"] == "Parameters"
    assert "gradientCheckpointing" not in reference or not reference["gradientCheckpointing"]
    assert reference["parallelism"]["data"] == 2


def test_a_reward_model_in_a_sum_gets_its_sizes() -> None:
    parts = [
        {"name": "rule", "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"}},
        {"name": "model", "weight": 0.5, "reward": {"uri": "job://helpful-rm"}},
    ]
    rule, model = given(changed(PPO, {"models.reward": {"sum": parts}}))["spec"]["models"]["reward"]["sum"]
    assert model["reward"]["parallelism"]["data"] == 2
    assert model["reward"]["uri"] == "file:///rlhf/inputs/helpful-rm/helpful-rm/model"
    assert "parallelism" not in rule["reward"]


def test_a_job_reads_the_data_set_where_another_has_written_it() -> None:
    writer, reader = example_jobs()["right-answers"], example_jobs()["learner"]
    assert storage.output_uri(writer) == "pvc://right-answers-output/right-answers/data"
    assert mounted(reader)["/rlhf/inputs/right-answers"] == ("right-answers-output", "", True)
    train = given(reader)["spec"]["data"]["train"]
    assert train["uri"] == "file:///rlhf/inputs/right-answers/right-answers/data"


def test_a_job_reads_the_claims_of_others_and_writes_its_own() -> None:
    job = example_jobs()[PPO]
    assert mounted(job) == {
        "/rlhf/output": ("helpful-ppo-output", "", False),
        "/rlhf/inputs/helpful-sft": ("helpful-sft-output", "", True),
        "/rlhf/inputs/helpful-rm": ("helpful-rm-output", "", True),
    }
    models = given(job)["spec"]["models"]
    assert models["actor"]["uri"] == "file:///rlhf/inputs/helpful-sft/helpful-sft/model"
    assert models["critic"]["uri"] == "file:///rlhf/inputs/helpful-rm/helpful-rm/model"
    assert storage.output_uri(job) == "pvc://helpful-ppo-output/helpful-ppo/model"
    assert claims_named(job.spec.model_dump()) == set()


def test_what_is_in_a_list_of_the_spec_is_mounted_too() -> None:
    merge = mounted(example_jobs()["both"])
    assert merge["/rlhf/inputs/helpful-ppo"] == ("helpful-ppo-output", "", True)
    assert merge["/rlhf/inputs/safe-rlhf"] == ("safe-rlhf-output", "", True)
    mix = changed(PPO, {"data.train": {"mix": [{"uri": "pvc://one/train.jsonl"}, {"uri": "pvc://other/rows"}]}})
    assert mounted(mix)["/rlhf/claims/one"] == ("one", "", True)
    assert mounted(mix)["/rlhf/claims/other"] == ("other", "", True)


def test_a_users_claim_is_not_made_and_has_a_folder_a_job() -> None:
    job = changed(PPO, {"checkpoint.storage": "pvc://shared/team/runs/"})
    assert list(made(job, CPUS)) == ["ConfigMap", "RayJob"]
    assert mounted(job)["/rlhf/output"] == ("shared", "team/runs/helpful-ppo", False)
    assert storage.output_uri(job) == "pvc://shared/team/runs/helpful-ppo/helpful-ppo/model"
    assert claims_named(job.spec.model_dump()) == {"shared"}
    assert given(job)["spec"]["checkpoint"]["storage"] is None
    whole = changed(PPO, {"checkpoint.storage": "pvc://shared"})
    assert mounted(whole)["/rlhf/output"] == ("shared", "helpful-ppo", False)


def test_a_bucket_keeps_namespaces_apart() -> None:
    job = changed(PPO, {"checkpoint.storage": "s3://bucket/runs/"})
    assert given(job)["spec"]["checkpoint"]["storage"] == "s3://bucket/runs/default"
    assert "PersistentVolumeClaim" in made(job, CPUS)


def test_models_and_data_of_claims_are_mounted_read_only_once() -> None:
    job = changed(
        PPO,
        {
            "models.actor.uri": "pvc://models/llama 7b/100%",
            "models.reference.uri": "pvc://models/etc",
            "models.actor.lora": {"initial": "pvc://models/adapter"},
            "data.train.uri": "pvc://sets.v2/train.jsonl",
            "rollout.speculation": {"method": "Draft", "draft": "pvc://models/small"},
            "checkpoint.storage": "pvc://models/runs",
            "resources.device": "CPU",
        },
    )
    assert mounted(job) == {
        "/rlhf/output": ("models", "runs/helpful-ppo", False),
        "/rlhf/inputs/helpful-rm": ("helpful-rm-output", "", True),
        "/rlhf/claims/models": ("models", "", True),
        "/rlhf/claims/sets.v2": ("sets.v2", "", True),
    }
    document = given(job)
    assert document["spec"]["models"]["actor"]["uri"] == "file:///rlhf/claims/models/llama%207b/100%25"
    assert document["spec"]["models"]["reference"]["uri"] == "file:///rlhf/claims/models/etc"
    assert document["spec"]["models"]["actor"]["lora"]["initial"] == "file:///rlhf/claims/models/adapter"
    assert document["spec"]["rollout"]["speculation"]["draft"] == "file:///rlhf/claims/models/small"
    assert document["spec"]["data"]["train"]["uri"] == "file:///rlhf/claims/sets.v2/train.jsonl"
    assert claims_named(job.spec.model_dump()) == {"models", "sets.v2"}


def test_no_path_leads_out_of_a_claim() -> None:
    assert storage.Place.of("pvc://models/../../etc/./x/") == storage.Place(claim="models", path="etc/x")


def test_the_same_answer_comes_twice() -> None:
    job = example_jobs()[PPO]
    assert made(job, CPUS) == made(job, list(reversed(CPUS)), SETTINGS)
