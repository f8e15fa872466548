"""What takes seconds to import comes after a run's mistakes are told, and where it is needed."""

import subprocess
import sys

HEAVY = {"datasets", "matplotlib", "pandas", "torch", "transformers", "vllm"}


def test_the_driver_begins_without_what_its_workers_need() -> None:
    program = f"import sys, rlhf_trainer.run.chain; sys.exit(', '.join({HEAVY} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_who_reads_data_imports_what_reads_it() -> None:
    program = "import sys, rlhf_trainer.run.on_ray; sys.exit(', '.join({'datasets', 'pandas'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
