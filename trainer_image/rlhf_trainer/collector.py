"""Python's collector of cycles, off while much is imported, and told to leave that alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """The collector does not run in the block, and afterwards does not look through what is there when the block ends.

    Of long imports it takes a good part, and finds nothing. `gc.unfreeze` has it look again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
