"""One plant made anew: `python -m tests.trainer.why.anew FOLDER PLANT SEED`."""

import sys
from pathlib import Path

from tests.trainer.why.plants import make

if __name__ == "__main__":
    make(Path(sys.argv[1]), [(sys.argv[2], int(sys.argv[3]))])
