"""The mathematics of the trainer: pure functions of tensors, shapes in the signatures, sources in the docstrings."""
