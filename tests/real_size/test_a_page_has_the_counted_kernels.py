"""Kernels of a real size are counted as docs/performance.md says."""

from tests.real_size.kernels import rows
from tests.repo.tree import ROOT


def test_the_page_says_how_many_kernels_there_are() -> None:
    found = {name: sum(each.count for each in both) for name, both in rows().items()}
    gigabytes = {name: round(sum(each.bytes_ for each in both) / 1e9) for name, both in rows().items()}
    head, old, fused = "head", "head, chunks of 2^26 logits", "head, fused"
    sentence = (
        f"16,384 tokens in the head of Qwen2.5-7B take {found[head]} kernels and {gigabytes[head]} GB read or written; "
        f"fused {found[fused]} and {gigabytes[fused]}; in chunks of 2^26 logits {found[old]:,} and {gigabytes[old]}. "
        f"A layer takes {found['layer']}, fused {found['layer, fused']} (`python -m tests.real_size.kernels`)."
    )
    assert sentence in " ".join((ROOT / "docs" / "performance.md").read_text().split())
