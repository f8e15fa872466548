"""SFT and reward model as SPMD programs under torchrun: the numbers of `rlhf run`, without Ray."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_api.exit_codes import ExitCode
from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain.conftest import MANIFEST, ROOT, SHORT, records

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "name", "loss"),
    [
        pytest.param("sft", "helpful-sft", "loss/sft", marks=pytest.mark.slow),
        ("reward_model", "helpful-rm", "loss/reward_model"),
    ],
)
def test_torchrun_gives_the_losses_of_rlhf_run(
    chain: tuple[Path, str], tmp_path: Path, program: str, name: str, loss: str
) -> None:
    output = tmp_path / "run"
    if program == "reward_model":
        output.mkdir()
        (output / "helpful-sft").symlink_to(chain[0] / "helpful-sft")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program_line = ["-m", "rlhf_trainer.spmd", program, str(MANIFEST), f"--output={output}", *SHORT]
    done = subprocess.run(
        [*command, *program_line],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    mine, theirs = records(output / name), records(chain[0] / name)
    assert [record[loss] for record in mine] == pytest.approx([record[loss] for record in theirs], rel=1e-6)
    assert json.loads((output / name / "status.json").read_text())["phase"] == "Succeeded"
    assert (output / name / "model" / "model.safetensors").is_file()
    assert json.loads((output / "summary.json").read_text())[name]["steps"] == len(mine)


def test_what_would_end_a_job_later_ends_every_rank_at_once(tmp_path: Path) -> None:
    change = "{keepBest: lost}"
    sets = ["--set=helpful-sft:evaluation.everySteps=1", f"--set=helpful-sft:checkpoint={change}"]
    command = [sys.executable, "-m", "rlhf_trainer.spmd", "sft", str(MANIFEST), f"--output={tmp_path / 'run'}", *sets]
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=PATIENCE_SECONDS)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.SPEC] * 2, told
    for sentence in told:
        assert "error: helpful-sft: spec.checkpoint.keepBest: lost is not measured; there are loss\n" in sentence
    status = json.loads((tmp_path / "run" / "helpful-sft" / "status.json").read_text())
    assert (status["phase"], status["lastFailure"]["exitCode"]) == ("Failed", ExitCode.SPEC)
