"""`trustRemoteCode`: Python code in a model folder is not run unless it is asked for."""

import json
from pathlib import Path

import pytest

from rlhf_api.spec.job_spec import Model
from rlhf_trainer.errors import DataError
from rlhf_trainer.training.loading import load_language_model
from tests.trainer.tiny import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose code would make the file `was-run`."""
    path = Path(save_tiny(tmp_path / "model", seed=1))
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (path / "config.json").write_text(json.dumps(config))
    code = [
        "from pathlib import Path",
        "from transformers import LlamaConfig, LlamaForCausalLM",
        f"Path({str(tmp_path / 'was-run')!r}).touch()",
        "class OwnConfig(LlamaConfig):",
        "    model_type = 'own'",
        "class OwnModel(LlamaForCausalLM):",
        "    config_class = OwnConfig",
    ]
    (path / "own.py").write_text("\n".join(code))
    return path


def load(folder: Path, *, trust: bool) -> object:
    return load_language_model(str(folder), seed=0, trust_remote_code=trust, revision=None)


def test_it_is_refused_by_default(folder: Path) -> None:
    assert Model(uri=f"file://{folder}").trust_remote_code is False
    with pytest.raises(DataError, match="code of its own, which runs only with trustRemoteCode"):
        load(folder, trust=False)
    assert not (folder.parent / "was-run").exists()


def test_it_runs_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    load(folder, trust=True)
    assert (folder.parent / "was-run").exists()
