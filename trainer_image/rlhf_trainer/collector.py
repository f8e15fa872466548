"""Switches Python's garbage collector off during long imports and freezes the imported objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the garbage collector off in the block, and exclude objects that exist at its end from later collections.

    During long imports collections take much of the time and find nothing. `gc.unfreeze` reverses the exclusion.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
