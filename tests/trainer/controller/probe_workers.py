"""Workers without a model, to see how calls and batches move."""

import time
from pathlib import Path
from typing import Any

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL, THREE_D_PROTO, AxisPlacement, sbp_protocol
from rlhf_trainer.types import Batch, Fields, register

WIDTH = 16
ADDENDS = sbp_protocol(
    "ADDENDS", takes={"data": AxisPlacement.SPLIT}, gives={"data": AxisPlacement.SPLIT, "tensor": AxisPlacement.PARTIAL}
)


class Source:
    """Makes fields, quickly and slowly."""

    @register(DP_PROTO, adds=("number", "ragged"), phase="data")
    def make(self, batch: Batch) -> Fields:
        """number [B]: the row; ragged [B, T]: the row, as wide as this rank's last row number."""
        rows = batch.rows
        return {"number": rows, "ragged": rows[:, None].repeat(1, int(rows.max()) + 1)}

    @register(DP_PROTO, adds=("number",))
    def make_in_vain(self, batch: Batch) -> Fields:
        raise NumericsError(f"the loss of {batch.size} rows is nan")

    @register(DP_PROTO, adds=("number",))
    def make_and_die(self, batch: Batch) -> Fields:
        import os

        os._exit(batch.size)

    @register(DP_PROTO, reads=("number",), adds=("slow",))
    def make_slowly(self, batch: Batch, *, seconds: float) -> Fields:
        time.sleep(seconds)
        return {"slow": batch["number"] * 10}

    @register(ONE_TO_ALL)
    def wait_for(self, *, file: str) -> None:
        """Return once the file exists."""
        while not Path(file).exists():
            time.sleep(0.05)

    @register(ONE_TO_ALL)
    def rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    @register(ONE_TO_ALL)
    def fail(self) -> None:
        raise NumericsError("the loss is nan")


class Sink:
    """Reads fields."""

    @register(DP_PROTO, reads=("number",))
    def read_number(self, batch: Batch) -> tuple[list[Any], float]:
        return batch["number"].tolist(), time.time()

    @register(DP_PROTO, reads=("ragged",))
    def read_ragged(self, batch: Batch) -> tuple[int, list[int], list[int]]:
        """(first row, shape, row sums)."""
        return batch.start, list(batch["ragged"].shape), batch["ragged"].sum(1).tolist()

    @register(DP_PROTO, reads=("number", "slow"), adds=("sum",))
    def add(self, batch: Batch) -> Fields:
        return {"sum": batch["number"] + batch["slow"]}

    @register(DP_PROTO, reads=("sum",))
    def read_sum(self, batch: Batch) -> list[int]:
        return [int(value) for value in batch["sum"]]


class NearSink(Sink):
    """Makes a field that nobody but itself reads."""

    @register(DP_PROTO, reads=("number",), adds=("double",))
    def double(self, batch: Batch) -> Fields:
        return {"double": batch["number"] * 2}

    @register(DP_PROTO, reads=("number",), adds=("double",))
    def double_in_vain(self, batch: Batch) -> Fields:
        raise NumericsError(f"the double of {batch.size} rows is nan")

    @register(DP_PROTO, reads=("double",))
    def read_double(self, batch: Batch) -> list[int]:
        return [int(value) for value in batch["double"]]


class Wide:
    """A model of any layout, with tokens of a known type and width."""

    @register(THREE_D_PROTO, adds=("tokens",))
    def make(self, batch: Batch) -> Fields:
        return {"tokens": batch.rows[:, None].repeat(1, WIDTH)}

    @register(ADDENDS, adds=("tokens",))
    def make_addends(self, batch: Batch) -> Fields:
        return self.make(batch)

    @register(THREE_D_PROTO, reads=("tokens",), adds=("scores",))
    def score(self, batch: Batch) -> Fields:
        return {"scores": batch["tokens"].float().sum(1)}

    @register(THREE_D_PROTO, reads=("scores",))
    def read(self, batch: Batch) -> list[float]:
        return [float(value) for value in batch["scores"]]
