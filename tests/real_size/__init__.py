"""The product's own trainer at real sizes, without memory and without a GPU: fake tensors on a fake device.

`python -m tests.real_size` prints what fits where; see docs/performance.md.
"""
