"""The count of a folder of scripts tells the valid ones from the refused, and these by kind."""

from pathlib import Path

from tests.foreign.scripts.count import FRAGMENT, VALID, count

VERL = "python -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=org/sft"
TRL = "trl dpo --model_name_or_path org/sft --dataset_name org/pairs"


def test_texts_are_counted_by_project_and_outcome(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo no program of theirs")
    (tmp_path / "b.sh").write_text("# python -m verl.trainer.main_ppo in a comment")
    for name, estimator in {"c": "gpg", "d": "gdpo"}.items():
        (tmp_path / f"{name}.sh").write_text(f"{VERL} algorithm.adv_estimator={estimator}")
    (tmp_path / "e.sh").write_text("python -m verl.trainer.main_ppo data.train_files=a.parquet")
    (tmp_path / "f.sh").write_text(f"{VERL} ...")
    (tmp_path / "paths.yml").write_text("on: {push: {paths: [verl/trainer/main_ppo.py]}}")
    (tmp_path / "page.md").write_text(f"Text\n\n```bash\n{TRL}\n```\n\n```python\n{TRL}\n```\n")
    (tmp_path / "script.py").write_text(f'"""\n    ```sh\n    {TRL}\n    ```\n"""\n')
    (tmp_path / "sft.yaml").write_text("model_name_or_path: org/base\ndataset_name: org/texts\npacking: true\n")
    found = count(tmp_path)
    assert found["trl"] == {VALID: ["sft.yaml"]}
    assert found["trl in pages"] == {VALID: ["page.md#1", "script.py#1"]}
    refusals = found["verl"]
    assert refusals.pop(FRAGMENT) == ["e.sh", "f.sh"]
    assert sorted(name for names in refusals.values() for name in names) == ["c.sh", "d.sh"]
    assert all("is no algorithm here" in kind for kind in refusals)
