"""Drafted responses against responses without drafts: accepted share and chi-square test by method, as JSON.

python -m tests.accept.drafts        # minutes; Suffix if arctic-inference is installed
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_api.spec.rollout import Speculation
from tests.trainer.generation.conftest import import_vllm
from tests.trainer.generation.drafts import SAMPLES, draw, p_value, save_draft
from tests.trainer.generation.models import save_config
from tests.trainer.ranks import RankServer

TOKENS = 3


def measure(folder: Path) -> dict[str, Any]:
    """Figures by method, of a model with random weights and, for Draft, one that is nearly like it."""
    server, row = RankServer(import_vllm), dict[str, Any]()
    model, draft = save_config(folder / "model", "llama"), save_draft(folder / "draft")
    cases = [Speculation(method="NGram", tokens=TOKENS)]
    cases.append(Speculation(method="Draft", draft=f"file://{draft}", tokens=TOKENS))
    if find_spec("arctic_inference"):
        cases.append(Speculation(method="Suffix", tokens=TOKENS))
    (plain,) = server.run(1, draw, model, None, SAMPLES)
    for each in cases:
        (drafted,) = server.run(1, draw, model, each, SAMPLES, draft if each.draft else None)
        accepted, offered = drafted.drafts
        chance = p_value(plain.responses, drafted.responses)
        row[each.method] = {"accepted": accepted / offered, "chi-square p": chance, "samples": SAMPLES}
        print(each.method, row[each.method], file=sys.stderr)
    return row


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made))))
