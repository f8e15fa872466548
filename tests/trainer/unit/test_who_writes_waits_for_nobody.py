"""A rank that writes the final model to a slow disk is not taken for one that waits for others."""

import traceback

from rlhf_trainer.controller.diagnosis import is_waiting
from tests.each import each_case

SAVING = "/x/rlhf_trainer/training/saving.py"
COLLECTIVE = "/x/torch/distributed/distributed_c10d.py"


@each_case(
    ("frames", "waits"),
    [
        ([("/x/worker.py", "save"), (SAVING, "save_model"), (SAVING, "write_weights"), ("/x/io.py", "write")], False),
        ([("/x/worker.py", "end_checkpoint"), (SAVING, "end_save"), ("/x/futures.py", "result")], True),
        ([("/x/worker.py", "update_actor"), (COLLECTIVE, "all_reduce")], True),
        ([("/x/worker.py", "update_actor"), ("/x/model.py", "forward")], False),
    ],
)
def test_only_a_rank_that_waits_is_said_to_wait(frames: list[tuple[str, str]], waits: bool) -> None:
    stack = traceback.StackSummary.from_list([traceback.FrameSummary(file, 1, name) for file, name in frames])
    assert is_waiting(stack) is waits
