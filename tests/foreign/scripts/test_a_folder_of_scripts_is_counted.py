"""The count of a folder of scripts tells the valid ones from the refused, and these by kind."""

from pathlib import Path

from tests.foreign.scripts.count import VALID, count

TRL = "trl dpo --model_name_or_path org/sft --dataset_name org/pairs"


def test_texts_are_counted_by_project_and_outcome(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo no program of theirs")
    (tmp_path / "b.sh").write_text("# python -m verl.trainer.main_ppo in a comment")
    (tmp_path / "c.sh").write_text("python -m verl.trainer.main_ppo algorithm.adv_estimator=gpg")
    (tmp_path / "d.sh").write_text("python -m verl.trainer.main_ppo algorithm.adv_estimator=gdpo")
    (tmp_path / "page.md").write_text(f"Text\n\n```bash\n{TRL}\n```\n\n```python\n{TRL}\n```\n")
    (tmp_path / "script.py").write_text(f'"""\n    ```sh\n    {TRL}\n    ```\n"""\n')
    (tmp_path / "sft.yaml").write_text("model_name_or_path: org/base\ndataset_name: org/texts\npacking: true\n")
    found = count(tmp_path)
    assert found["trl"] == {VALID: ["sft.yaml"]}
    assert found["trl in pages"] == {VALID: ["page.md#1", "script.py#1"]}
    refusals = found["verl"]
    assert sorted(name for names in refusals.values() for name in names) == ["c.sh", "d.sh"]
    assert all("is no algorithm here" in kind for kind in refusals)
