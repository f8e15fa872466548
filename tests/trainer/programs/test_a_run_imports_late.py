"""What takes seconds to import comes after a run's mistakes are told, and where it is needed."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_trainer.collector import collector_off

HEAVY = {"datasets", "matplotlib", "pandas", "torch", "transformers", "vllm"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "01-helpful-ppo.yaml"
PLACE_THE_LAST = f"""
import sys
from pathlib import Path
from rlhf_api.files import load
from rlhf_api.problems import SpecError
from rlhf_trainer.run.placement import place_job
jobs = load(Path(sys.argv[1]))
try:
    place_job(jobs[-1], (0,), jobs, Path("run"))
except SpecError as error:
    print(error)
sys.exit(', '.join({HEAVY} & set(sys.modules)) or 0)
"""


def test_the_driver_begins_without_what_its_workers_need() -> None:
    program = f"import sys, rlhf_trainer.run.chain; sys.exit(', '.join({HEAVY} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def place_the_last(folder: Path, uri: str) -> str:
    """Return the error of placing the example's last job, whose model an earlier job trains from this one."""
    text = EXAMPLE.read_text().replace("package://rlhf_examples/helpful/model", uri)
    (folder / "job.yaml").write_text(text)
    program = [sys.executable, "-c", PLACE_THE_LAST, str(folder / "job.yaml")]
    hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder)}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=os.environ | hub)
    assert done.returncode == 0, done.stderr
    return done.stdout


UNKNOWN = "helpful-ppo: spec.models.actor: is a cohere, whose layout in vLLM this trainer does not know"


@pytest.mark.parametrize("family", ["cohere", "llama"])
def test_an_unknown_family_is_told_before_that(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert place_the_last(tmp_path, tmp_path.as_uri()).startswith(UNKNOWN) == (family == "cohere")


def test_an_unknown_family_on_the_hub_is_told_too(tmp_path: Path) -> None:
    """The model's config.json was fetched before, as no test has a network."""
    model = tmp_path / "models--org--model"
    for file, text in {"refs/main": "1", "snapshots/1/config.json": '{"model_type": "cohere"}'}.items():
        (model / file).parent.mkdir(parents=True)
        (model / file).write_text(text)
    assert place_the_last(tmp_path, "hf://org/model").startswith(UNKNOWN)


@pytest.mark.slow
def test_only_who_reads_data_imports_what_reads_it() -> None:
    program = "import sys, rlhf_trainer.run.on_ray; sys.exit(', '.join({'datasets', 'pandas'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_collector_runs_again_after_imports() -> None:
    with collector_off():
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
