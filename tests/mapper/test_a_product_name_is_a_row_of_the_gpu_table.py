"""A GPU, as a node or a driver names it, is the row of the table for that product, or none; figures are vendors'."""

import pytest

from rlhf_mapper.hardware import CPU_SLOT, GPUS, gpu_of_product

LABELS = {
    # nvidia.com/gpu.product, as gpu-feature-discovery writes it
    "NVIDIA-A100-SXM4-40GB": "a100-40g",
    "NVIDIA-A100-SXM4-80GB": "a100-80g",
    "A100-SXM4-40GB": "a100-40g",
    "NVIDIA-A100-SXM4-80GB-SHARED": "a100-80g",
    "NVIDIA-A100-PCIE-40GB": "a100-pcie-40g",
    "A100-PCIE-40GB": "a100-pcie-40g",
    "NVIDIA-A100-80GB-PCIe": "a100-pcie-80g",
    "NVIDIA-A100-PCIE-80GB": "a100-pcie-80g",
    "NVIDIA-H100-80GB-HBM3": "h100-80g",
    "NVIDIA-H100-PCIe": "h100-pcie-80g",
    "NVIDIA-H100-NVL": "h100-nvl-94g",
    "NVIDIA-H200": "h200-141g",
    "NVIDIA-H200-NVL": "h200-nvl-141g",
    "NVIDIA-B200": "b200-180g",
    "NVIDIA-L40S": "l40s-48g",
    "NVIDIA-A10": "a10-24g",
    "Tesla-T4": "t4-16g",
    "Tesla-T4-SHARED": "t4-16g",
    # amd.com/gpu.product-name
    "AMD_Instinct_MI300X_OAM": "mi300x-192g",
    # as torch and its driver name a device
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80g",
    "NVIDIA H100 80GB HBM3": "h100-80g",
    "NVIDIA H100 PCIe": "h100-pcie-80g",
    "NVIDIA H200": "h200-141g",
    "NVIDIA B200": "b200-180g",
    "Tesla T4": "t4-16g",
    "AMD Instinct MI300X": "mi300x-192g",
}
OTHERS = [
    "",
    "NVIDIA",
    "cpu-slot",
    "NVIDIA-A100",  # of which memory?
    "NVIDIA-A100-SXM-64GB",
    "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
    "NVIDIA-A100-PCIE-40GB-MIG-3g.20gb",
    "NVIDIA-H100-80GB-HBM3-MIG-7g.80gb",
    "NVIDIA-H200-MIG-1g.18gb-SHARED",
    "NVIDIA A100-SXM4-80GB MIG 7g.80gb",
    "GRID-A100-40C",
    "NVIDIA-A800-SXM4-80GB",
    "NVIDIA-H100-80GB-HBM2e",
    "NVIDIA-H100-64GB-HBM2",
    "NVIDIA-H20",
    "NVIDIA-GH200-480GB",
    "NVIDIA-GB200",
    "NVIDIA-A10G",
    "NVIDIA-A100X",
    "NVIDIA-L40",
    "NVIDIA-L4",
    "NVIDIA-T400-4GB",
    "NVIDIA-T4G",
    "NVIDIA-GeForce-RTX-4090",
    "AMD_Instinct_MI300A",
    "AMD_Instinct_MI325X_OAM",
]


@pytest.mark.parametrize(("product", "row"), LABELS.items())
def test_a_product_is_recognised_by_node_label_and_by_driver_name(product: str, row: str) -> None:
    found = gpu_of_product(product)
    assert found
    assert found.name == row


@pytest.mark.parametrize("product", OTHERS)
def test_a_product_that_the_table_lacks_is_not_taken_for_one_like_it(product: str) -> None:
    """Least of all a slice of a GPU (MIG) for the whole."""
    assert gpu_of_product(product) is None


def test_every_row_has_a_product_that_is_recognised_as_it() -> None:
    assert set(LABELS.values()) == GPUS.keys() - {CPU_SLOT.name}


# From the vendors' data sheets: memory in GB; dense TFLOP/s in bf16 (T4: fp16) and in fp32; memory bandwidth in GB/s;
# NVLink, Infinity Fabric or PCIe of a GPU in GB/s, both directions together; PCIe in GB/s, one direction.
FIGURES = {
    "a100-40g": (40, 312, 19.5, 1555, 600, 32),
    "a100-80g": (80, 312, 19.5, 2039, 600, 32),
    "a100-pcie-40g": (40, 312, 19.5, 1555, 64, 32),
    "a100-pcie-80g": (80, 312, 19.5, 1935, 64, 32),
    "h100-80g": (80, 1979 / 2, 67, 3350, 900, 64),
    "h100-pcie-80g": (80, 1513 / 2, 51, 2000, 128, 64),
    "h100-nvl-94g": (94, 1671 / 2, 60, 3900, 128, 64),
    "h200-141g": (141, 1979 / 2, 67, 4800, 900, 64),
    "h200-nvl-141g": (141, 1671 / 2, 60, 4800, 128, 64),
    "b200-180g": (180, 4500 / 2, 75, 7700, 1800, 64),
    "l40s-48g": (48, 362, 91.6, 864, 64, 32),
    "a10-24g": (24, 125, 31.2, 600, 64, 32),
    "t4-16g": (16, 65, 8.1, 320, 32, 16),
    "mi300x-192g": (192, 1307.4, 163.4, 5300, 896, 64),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_a_gpu_are_those_of_its_data_sheet(name: str) -> None:
    gpu = GPUS[name]
    found = (gpu.memory, gpu.bf16, gpu.fp32, gpu.memory_bandwidth, gpu.link_bandwidth, gpu.host_bandwidth)
    units = (1e9, 1e12, 1e12, 1e9, 1e9, 1e9)
    assert [each / unit for each, unit in zip(found, units, strict=True)] == pytest.approx(FIGURES[name], rel=2e-3)


def test_every_gpu_s_figures_are_checked() -> None:
    assert FIGURES.keys() == GPUS.keys() - {CPU_SLOT.name}
