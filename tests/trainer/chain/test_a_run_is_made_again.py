"""`rlhf reproduce` on real Ray: PPO is equal from the start and from a checkpoint; one changed row is found."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rlhf_examples
from rlhf_trainer.data.order import permutation
from tests.trainer.chain.conftest import rlhf

PPO, SFT = "helpful-ppo", "helpful-sft"


def again(chain: tuple[Path, str], *options: str) -> subprocess.CompletedProcess[str]:
    done = rlhf("reproduce", chain[0], *options)
    shutil.rmtree(chain[0].with_name(f"{chain[0].name}-reproduced"))
    return done


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--steps=2",), ("--from=2", "--steps=1")], ids=["start", "checkpoint"])
def test_steps_of_ppo_are_equal(chain: tuple[Path, str], options: tuple[str, ...]) -> None:
    before = {file: file.stat().st_mtime_ns for file in chain[0].rglob("*")}
    done = again(chain, f"--job={PPO}", *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "differs" not in done.stdout
    sentence = done.stdout.splitlines()[-1]
    assert " are equal: " in sentence
    assert f"{4 * (3 - len(options))} checksums of weights" in sentence, "of two models on two ranks"
    assert {file: file.stat().st_mtime_ns for file in chain[0].rglob("*")} == before


@pytest.mark.slow
def test_a_changed_row_is_found_in_its_file_step_and_rank(chain: tuple[Path, str], tmp_path: Path) -> None:
    """SFT takes 32 rows a step, so that this one is read in step 2."""
    lines = Path(rlhf_examples.__path__[0], "helpful", "train.jsonl").read_text().splitlines()
    row = int(permutation(len(lines), 0, 0, 0)[37])
    lines[row] = json.dumps({**json.loads(lines[row]), "chosen": " No."})
    file = tmp_path / "changed.jsonl"
    file.write_text("\n".join(lines) + "\n")
    done = again(chain, f"--job={SFT}", f"--set=data.train.uri={file.as_uri()}")
    (told,) = (line for line in done.stdout.splitlines() if "differs" in line)
    assert told.startswith(f"{SFT}: differs: spec.data.train.uri is {file.as_uri()}, was package://"), told
    assert told.endswith(f"; line {row + 1} is the first that differs"), told
    assert done.returncode == 2
    assert re.search(r"inputs differ \(1\): step 2: .*first in actor.\w+ on rank all/[01]", done.stderr)
