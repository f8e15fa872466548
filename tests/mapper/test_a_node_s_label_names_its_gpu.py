"""What discovery writes on nodes is the GPU of the table, or none of it."""

import pytest

from rlhf_mapper.hardware import gpu_of_product


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("NVIDIA-A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA-A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA-A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA-H100-80GB-HBM3", "h100-80g"),
        ("NVIDIA-H200", "h200-141g"),
        ("NVIDIA-B200", "b200-180g"),
        ("NVIDIA-L40S", "l40s-48g"),
        ("NVIDIA-A10", "a10-24g"),
        ("Tesla-T4", "t4-16g"),
        ("Tesla-T4-SHARED", "t4-16g"),
        ("AMD_Instinct_MI300X_OAM", "mi300x-192g"),
    ],
)
def test_a_label_is_a_row_of_the_table(label: str, expected: str) -> None:
    found = gpu_of_product(label)
    assert found
    assert found.name == expected


@pytest.mark.parametrize(
    "label",
    [
        "",
        "NVIDIA-A10G",
        "NVIDIA-H100-PCIe",
        "NVIDIA-H100-NVL",
        "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
        "NVIDIA-A100",
        "cpu-slot",
    ],
)
def test_what_the_table_lacks_is_not_taken_for_something_like_it(label: str) -> None:
    assert gpu_of_product(label) is None
