"""A ladder of checks for a machine with GPUs: `python -m tests.gpu`; docs/what-ran-on-a-gpu.md says what each settles.

With `--rehearse` every rung takes the same way through the code on the CPU, with a tiny model.
"""
