"""What is committed under rlhf_examples.helpful is what the script writes, byte for byte."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMITTED = EXAMPLES / "rlhf_examples" / "helpful"
WRITTEN_BY_THE_SCRIPT = {
    "train.jsonl",
    "heldout.jsonl",
    "safety_train.jsonl",
    "safety_heldout.jsonl",
    "model/config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
}


def read_data(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_script_reproduces_the_committed_data(tmp_path: Path) -> None:
    script = EXAMPLES / "make_helpful.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True, timeout=120)
    written, committed = read_data(tmp_path), read_data(COMMITTED)
    assert set(written) == set(committed) == WRITTEN_BY_THE_SCRIPT
    changed = [name for name in written if written[name] != committed[name]]
    assert changed == [], "run `python examples/make_helpful.py` and commit what it writes"
