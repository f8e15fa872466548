"""A machine whose clock is wrong, for one program: a library that is preloaded into it moves its time of day."""

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class WrongClock:
    """Right at first; `environment` gives it to a program that is started."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(self._file)}

    def set(self, ahead: int) -> None:
        """So many seconds ahead of what is right, from now on, also for programs that run."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", ahead))
