"""What takes seconds to import comes after a run's mistakes are told, and where it is needed."""

import gc
import subprocess
import sys

import pytest

from rlhf_trainer.collector import collector_off

HEAVY = {"datasets", "matplotlib", "pandas", "torch", "transformers", "vllm"}


def test_the_driver_begins_without_what_its_workers_need() -> None:
    program = f"import sys, rlhf_trainer.run.chain; sys.exit(', '.join({HEAVY} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
