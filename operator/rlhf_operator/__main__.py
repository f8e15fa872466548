"""Entry point of `python -m rlhf_operator`."""

from rlhf_operator.main import main

main()
