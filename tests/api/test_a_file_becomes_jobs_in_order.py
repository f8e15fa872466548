"""A manifest becomes jobs that are complete, in order, and can be written back."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_api.files import dump, load
from rlhf_api.job import Job
from rlhf_api.kubectl_yaml import read
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithms import KL
from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.algorithms.ppo import PPO
from tests.each import each_case


def _job(text: str, name: str, *overrides: str) -> Job:
    return next(job for job in load(text, overrides) if job.name == name)


def test_a_job_comes_after_those_it_reads(chain: str) -> None:
    assert [job.name for job in load(chain)] == ["helpful-sft", "helpful-reward", "helpful-ppo"]


def test_jobs_that_do_not_read_each_other_stay_in_their_order(chain: str) -> None:
    documents = chain.split("---\n")
    independent = "---\n---\n".join(documents[1].replace("helpful-sft", name) for name in ("c", "a", "b"))
    assert [job.name for job in load(independent)] == ["c", "a", "b"]


def test_jobs_written_back_are_read_as_the_same_jobs(chain: str) -> None:
    jobs = load(chain, ['helpful-sft:models.actor.revision="1e5"', "helpful-ppo:algorithm.valueClipRange=null"])
    assert load("---\n".join(map(dump, jobs))) == jobs


def test_a_job_written_back_holds_its_defaults(chain: str) -> None:
    [document] = read(dump(_job(chain, "helpful-ppo")), "")
    assert document["apiVersion"] == "rlhf.hybridflow.io/v1alpha1"
    assert document["metadata"] == {"name": "helpful-ppo", "namespace": "default", "labels": {}, "annotations": {}}
    assert document["spec"]["algorithm"]["gaeLambda"] == 0.95
    assert document["spec"]["models"]["actor"]["optimizer"]["betas"] == [0.9, 0.1]


def test_a_job_uses_the_models_of_its_algorithm_only(chain: str) -> None:
    assert list(_job(chain, "helpful-sft").models()) == ["actor"]
    assert list(_job(chain, "helpful-reward").models()) == ["reward"]
    assert list(_job(chain, "helpful-ppo").models()) == ["actor", "critic", "reference", "reward"]


def test_the_reference_is_the_actor_untrained_unless_given(chain: str) -> None:
    models = _job(chain, "helpful-ppo").models()
    assert models["reference"] == models["actor"].model_copy(update={"optimizer": None, "gradient_checkpointing": None})
    given = _job(chain, "helpful-ppo", "helpful-ppo:models.reference={uri: hf://gpt2}").models()
    assert given["reference"].uri == "hf://gpt2"


@each_case(
    ("actor", "reference"),
    [
        ("None", "None"),
        ("Parameters", "Parameters"),
        ("Optimizer", "None"),
        ("All", "Parameters"),
        ("OptimizerInHost", "Parameters"),
    ],
)
def test_the_reference_leaves_the_device_as_the_actor_does(chain: str, actor: str, reference: str) -> None:
    assert (
        _job(chain, "helpful-ppo", f"helpful-ppo:models.actor.offload={actor}").models()["reference"].offload
        == reference
    )


def test_trained_models_have_an_optimizer(chain: str) -> None:
    models = _job(chain, "helpful-ppo").models()
    assert models["actor"].optimizer == Optimizer(learning_rate=1e-6, betas=(0.9, 0.1))
    assert models["critic"].optimizer == Optimizer()
    assert models["reward"].optimizer is None


# sentence -> job, rows, steps
STEPS = {
    "steps that are given": ("helpful-ppo", 1000, 3),
    "two epochs of whole batches": ("helpful-sft", 32, 4),
    "two epochs end to end with a short last batch": ("helpful-sft", 33, 5),
}


@pytest.mark.parametrize(("name", "rows", "steps"), STEPS.values(), ids=STEPS)
def test_epochs_become_steps(chain: str, name: str, rows: int, steps: int) -> None:
    assert _job(chain, name).total_steps_for(rows) == steps


def test_a_step_has_all_samples_of_all_prompts(chain: str) -> None:
    assert _job(chain, "helpful-ppo").sequences_per_step == 32
    assert _job(chain, "helpful-sft").sequences_per_step == 16


def test_the_kl_estimator_follows_where_the_kl_is_applied() -> None:
    assert KL().resolved_estimator == "K1"
    assert KL(apply_to="Loss").resolved_estimator == "K3"
    assert KL(apply_to="Loss", estimator="K2").resolved_estimator == "K2"


def test_ppo_has_the_defaults_of_its_papers() -> None:
    ppo = PPO(name="PPO")
    assert (ppo.discount, ppo.gae_lambda, ppo.clip_range, ppo.value_clip_range) == (1.0, 0.95, 0.2, 0.2)
    assert (ppo.kl.coefficient, ppo.kl.horizon, ppo.kl.target) == (0.05, 10000, None)


# sentence -> uri in the manifest, uri of the job
URIS = {
    "a path that starts with a point": ("file://./data", "file://{folder}/data"),
    "a bare path": ("file://data/x", "file://{folder}/data/x"),
    "a parent": ("file://../data", "file://{parent}/data"),
    "an absolute path": ("file:///data", "file:///data"),
    "another scheme": ("hf://./data", "hf://./data"),
}


@pytest.mark.parametrize(("given", "resolved"), URIS.values(), ids=URIS)
def test_a_relative_file_is_relative_to_the_manifest(chain: str, tmp_path: Path, given: str, resolved: str) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(chain)
    overrides = [f"data.train.uri={given}", f"helpful-sft:models.actor.uri={given}"]
    sft = load(manifest, overrides)[0].spec
    expected = resolved.format(folder=tmp_path, parent=tmp_path.parent)
    assert [source.address for source in sft.data.train.sources("").values()] == [expected]
    assert sft.models.actor
    assert sft.models.actor.uri == expected


def test_a_relative_path_to_a_manifest_gives_absolute_uris(
    chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(chain)
    monkeypatch.chdir(tmp_path)
    sft = load(Path("job.yaml"), ["data.train.uri=file://./data"])[0]
    assert [source.address for source in sft.spec.data.train.sources("").values()] == [f"file://{Path.cwd()}/data"]


def test_a_job_cannot_be_changed(chain: str) -> None:
    job = _job(chain, "helpful-sft")
    with pytest.raises(ValidationError, match="frozen"):
        job.spec.training.seed = 1  # type: ignore[misc]


def test_a_job_may_read_one_that_has_finished_before(chain: str) -> None:
    ppo = chain.split("---", maxsplit=1)[0]
    finished = {"helpful-sft": "SFT", "helpful-reward": "RewardModel"}
    assert [job.name for job in load(ppo, finished=finished)] == ["helpful-ppo"]
    with pytest.raises(SpecError, match="is a job of SFT, expected RewardModel"):
        load(ppo, finished={**finished, "helpful-reward": "SFT"})
    with pytest.raises(SpecError, match="no job of this file, or finished in the run folder"):
        load(ppo)
