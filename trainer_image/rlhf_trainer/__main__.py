"""Entry point of the `rlhf` command: Ctrl-C ends it without a traceback, also while it imports."""

import os
import signal


def main() -> None:
    """Import the command line and run it. Until it is imported, there is nothing to clean up."""
    default = signal.getsignal(signal.SIGINT)
    if default is not signal.SIG_IGN:  # SIG_IGN: a background job of a shell
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from rlhf_trainer.commands.cli import main as run

    signal.signal(signal.SIGINT, default)
    run()


if __name__ == "__main__":
    main()
