"""What takes seconds to import comes after a run's mistakes are told, and where it is needed."""

import subprocess
import sys
from pathlib import Path

from tests.trainer.jobs import job
from tests.trainer.pods.manifests import SFT

HEAVY = {"datasets", "matplotlib", "pandas", "torch", "transformers", "vllm"}


def test_the_driver_begins_without_what_its_workers_need() -> None:
    program = f"import sys, rlhf_trainer.run.chain; sys.exit(', '.join({HEAVY} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_who_reads_data_imports_what_reads_it() -> None:
    program = "import sys, rlhf_trainer.run.on_ray; sys.exit(', '.join({'datasets', 'pandas'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RAY_STARTS = """
import sys, time
from pathlib import Path
from rlhf_trainer.outputs.listeners import OutputOptions
from rlhf_trainer.run import chain

def ray_session(*_, **__):
    until = time.monotonic() + 60
    while "torch" not in sys.modules:
        assert time.monotonic() < until, "nobody imports torch"
        time.sleep(0.01)
    sys.exit(0)

chain.ray_session = ray_session
options = OutputOptions(tensorboard=False, trace=False, metrics_port=None)
chain.run_file(
    Path(sys.argv[1]), output=Path(sys.argv[2]), overrides=[], restart=False, address=None, options=options
)
"""


def test_while_ray_starts_the_driver_imports_what_its_workers_need(tmp_path: Path) -> None:
    job(tmp_path, "mine", SFT)
    command = [sys.executable, "-c", RAY_STARTS, str(tmp_path / "mine.yaml"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_while_ray_starts_does_not_import_ray_at_the_same_time() -> None:
    program = "import sys, rlhf_trainer.run.assembly; sys.exit(', '.join({'ray', 'vllm'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
