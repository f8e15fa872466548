"""A GPU, as a node or a driver names it, is the row of the table for that product, or none; figures are vendors'."""

import pytest

from rlhf_mapper.hardware import CPU_SLOT, GPUS, gpu_of_product
from tests.each import each_case

LABELS = {
    # nvidia.com/gpu.product, as gpu-feature-discovery writes it
    "NVIDIA-A100-SXM4-40GB": "a100-40g",
    "NVIDIA-A100-SXM4-80GB": "a100-80g",
    "A100-SXM4-40GB": "a100-40g",
    "NVIDIA-A100-PCIE-40GB": "a100-pcie-40g",
    "A100-PCIE-40GB": "a100-pcie-40g",
    "NVIDIA-A100-80GB-PCIe": "a100-pcie-80g",
    "NVIDIA-A100-PCIE-80GB": "a100-pcie-80g",
    "NVIDIA-A800-SXM4-80GB": "a800-80g",
    "NVIDIA-A800-PCIE-40GB": "a800-pcie-40g",
    "NVIDIA-A800-80GB-PCIe": "a800-pcie-80g",
    "NVIDIA-H100-80GB-HBM3": "h100-80g",
    "NVIDIA-H100-PCIe": "h100-pcie-80g",
    "NVIDIA-H100-NVL": "h100-nvl-94g",
    "NVIDIA-H800": "h800-80g",
    "NVIDIA-H800-PCIe": "h800-pcie-80g",
    "NVIDIA-H20": "h20-96g",
    "NVIDIA-H200": "h200-141g",
    "NVIDIA-H200-NVL": "h200-nvl-141g",
    "NVIDIA-B200": "b200-180g",
    "NVIDIA-B300-SXM6-AC": "b300-288g",
    "NVIDIA-GB200": "gb200-186g",
    "NVIDIA-L4": "l4-24g",
    "NVIDIA-L40": "l40-48g",
    "NVIDIA-L40S": "l40s-48g",
    "NVIDIA-A10": "a10-24g",
    "NVIDIA-A10G": "a10g-24g",
    "Tesla-T4": "t4-16g",
    "NVIDIA-GeForce-RTX-4090": "rtx-4090-24g",
    # amd.com/gpu.product-name
    "AMD_Instinct_MI300X_OAM": "mi300x-192g",
    # cloud.google.com/gke-accelerator
    "nvidia-tesla-a100": "a100-40g",
    "nvidia-a100-80gb": "a100-80g",
    "nvidia-h100-mega-80gb": "h100-80g",
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
    "NVIDIA-A100-SXM4-80GB-SHARED",  # pods use it in turn
    "Tesla-T4-SHARED",
    "NVIDIA-H200-MIG-1g.18gb-SHARED",
    "NVIDIA-A100-SXM4-80GB-MIG-1c.3g.40gb",  # a part of a slice
    "NVIDIA-A100-MIG-1g.10gb",
    "NVIDIA-A800-40GB-Active",
    "GRID-A100-40C",
    "NVIDIA-H100-80GB-HBM2e",
    "NVIDIA-H100-64GB-HBM2",
    "NVIDIA-H20-3e",
    "NVIDIA-GH200-480GB",
    "NVIDIA-GB300",
    "NVIDIA-A100X",
    "NVIDIA-L20",
    "NVIDIA-T400-4GB",
    "NVIDIA-T4G",
    "NVIDIA-GeForce-RTX-4090-D",
    "NVIDIA-GeForce-RTX-4090-Laptop-GPU",
    "AMD_Instinct_MI300A",
    "AMD_Instinct_MI325X_OAM",
]


@each_case(("product", "row"), LABELS.items())
def test_a_product_is_known_by_node_label_and_driver_name(product: str, row: str) -> None:
    found = gpu_of_product(product)
    assert found
    assert found.name == row


@each_case("product", OTHERS)
def test_an_unknown_product_is_not_taken_for_one_like_it(product: str) -> None:
    """Nor a GPU that pods use in turn for one of their own."""
    assert gpu_of_product(product) is None


@each_case(
    ("product", "name", "memory", "sevenths"),
    [
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "a100-80g-mig-1g.10gb", 10e9, 1),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb.me", "a100-80g-mig-1g.10gb", 10e9, 1),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.20gb", "a100-80g-mig-1g.20gb", 20e9, 1),
        ("nvidia-tesla-a100-MIG-1g.5gb", "a100-40g-mig-1g.5gb", 5e9, 1),
        ("NVIDIA-A100-PCIE-40GB-MIG-3g.20gb", "a100-pcie-40g-mig-3g.20gb", 20e9, 3),
        ("NVIDIA-H100-80GB-HBM3-MIG-7g.80gb", "h100-80g-mig-7g.80gb", 80e9, 7),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", "a100-80g-mig-7g.80gb", 80e9, 7),
    ],
)
def test_a_slice_is_a_gpu_of_its_own_size(product: str, name: str, memory: float, sevenths: int) -> None:
    found = gpu_of_product(product)
    assert found
    whole = GPUS[found.name.partition("-mig-")[0]]
    share = memory / whole.memory
    assert found.name == name
    assert found.memory == pytest.approx(memory)
    assert found.bf16 == pytest.approx(whole.bf16 * sevenths / 7)
    assert found.memory_bandwidth == pytest.approx(share * whole.memory_bandwidth)
    assert found.link_bandwidth == pytest.approx(2 * share * whole.host_bandwidth), "slices have no NVLink"


def test_every_row_has_a_product_that_is_recognised_as_it() -> None:
    assert set(LABELS.values()) == GPUS.keys() - {CPU_SLOT.name}


# From the vendors' data sheets: memory in GB; dense TFLOP/s in bf16 (T4: fp16) and in fp32; memory bandwidth in GB/s;
# NVLink, Infinity Fabric or PCIe of a GPU in GB/s, both directions together; PCIe (GB200: NVLink-C2C) in GB/s, one
# direction; then a GPU's part of the network of a usual node, in Gb/s.
FIGURES = {
    "a100-40g": (40, 312, 19.5, 1555, 600, 32, 1600 / 8),
    "a100-80g": (80, 312, 19.5, 2039, 600, 32, 1600 / 8),
    "a100-pcie-40g": (40, 312, 19.5, 1555, 64, 32, 400 / 8),
    "a100-pcie-80g": (80, 312, 19.5, 1935, 64, 32, 400 / 8),
    "a800-80g": (80, 312, 19.5, 2039, 400, 32, 1600 / 8),
    "a800-pcie-40g": (40, 312, 19.5, 1555, 64, 32, 400 / 8),
    "a800-pcie-80g": (80, 312, 19.5, 1935, 64, 32, 400 / 8),
    "h100-80g": (80, 1979 / 2, 67, 3350, 900, 64, 3200 / 8),
    "h100-pcie-80g": (80, 1513 / 2, 51, 2000, 128, 64, 400 / 8),
    "h100-nvl-94g": (94, 1671 / 2, 60, 3900, 128, 64, 400 / 8),
    "h800-80g": (80, 1979 / 2, 67, 3350, 400, 64, 3200 / 8),
    "h800-pcie-80g": (80, 1513 / 2, 51, 2000, 128, 64, 400 / 8),
    "h20-96g": (96, 148, 44, 4000, 900, 64, 3200 / 8),
    "h200-141g": (141, 1979 / 2, 67, 4800, 900, 64, 3200 / 8),
    "h200-nvl-141g": (141, 1671 / 2, 60, 4800, 128, 64, 400 / 8),
    "b200-180g": (180, 4500 / 2, 75, 7700, 1800, 64, 3200 / 8),
    "b300-288g": (288, 36000 / 8 / 2, 600 / 8, 8000, 1800, 64, 6400 / 8),
    "gb200-186g": (186, 5000 / 2, 5760 / 72, 576_000 / 72, 1800, 900 / 2 / 2, 1600 / 4),
    "l4-24g": (24, 242 / 2, 30.3, 300, 64, 32, 100 / 8),
    "l40-48g": (48, 181, 90.5, 864, 64, 32, 400 / 8),
    "l40s-48g": (48, 362, 91.6, 864, 64, 32, 400 / 8),
    "a10-24g": (24, 125, 31.2, 600, 64, 32, 100 / 8),
    "a10g-24g": (24, 140 / 2, 35, 600, 64, 32, 100 / 8),
    "t4-16g": (16, 65, 8.1, 320, 32, 16, 100 / 8),
    "rtx-4090-24g": (24, 330.3 / 2, 82.6, 1008, 64, 32, 100 / 8),
    "mi300x-192g": (192, 1307.4, 163.4, 5300, 896, 64, 3200 / 8),
}


@each_case("name", FIGURES)
def test_the_figures_of_a_gpu_are_those_of_its_data_sheet(name: str) -> None:
    gpu = GPUS[name]
    rates = (gpu.memory_bandwidth, gpu.link_bandwidth, gpu.host_bandwidth, gpu.network_bandwidth)
    found = (gpu.bf16, gpu.fp32, *rates)
    units = (1e12, 1e12, 1e9, 1e9, 1e9, 1e9 / 8)
    memory, *figures = FIGURES[name]
    assert [each / unit for each, unit in zip(found, units, strict=True)] == pytest.approx(figures, rel=2e-3)
    assert 0.97 < gpu.memory / (1e9 * memory) < 1.08, "torch reports between the quoted GB and as many GiB"


def test_every_gpu_s_figures_are_checked() -> None:
    assert FIGURES.keys() == GPUS.keys() - {CPU_SLOT.name}
