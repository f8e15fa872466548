"""How long tests wait for what always comes: it only ends a test that hangs, and says nothing of a speed."""

from typing import Final

PATIENCE_SECONDS: Final = 900
"""Many times what anything here takes on a slow machine that does something else, too; pytest's own limit is longer."""
BUSY_FACTOR: Final = 5
"""So many times as long as on an idle machine is waited for what a test knows the usual seconds of."""
