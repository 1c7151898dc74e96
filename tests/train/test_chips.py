"""Device kinds as JAX spells them match their row, and only theirs."""

import pytest

from jaxvlm.train.chips import lookup

KINDS = {
    "TPU v4": ("TPU v4", 275),
    "TPU v5 lite": ("TPU v5e", 197),
    "TPU v5e": ("TPU v5e", 197),
    "TPU v5": ("TPU v5p", 459),
    "TPU v5p": ("TPU v5p", 459),
    "TPU v6 lite": ("TPU v6e", 918),
    "TPU7x": ("TPU7x (half a chip)", 1153.5),
    "NVIDIA A100-SXM4-40GB": ("A100 40GB", 312),
    "NVIDIA A100-PCIE-40GB": ("A100 40GB PCIe", 312),
    "NVIDIA A100-SXM4-80GB": ("A100 80GB SXM", 312),
    "NVIDIA A100 80GB PCIe": ("A100 80GB PCIe", 312),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 989.5),
    "NVIDIA H100 PCIe": ("H100 PCIe", 756),
    "NVIDIA H100 NVL": ("H100 NVL", 835.5),
    "NVIDIA H200": ("H200 SXM", 989.5),
    "NVIDIA H200 NVL": ("H200 NVL", 835.5),
    "NVIDIA B200": ("B200", 2250),
    "NVIDIA GB200": ("GB200", 2500),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 165.2),
    "NVIDIA RTX 6000 Ada Generation": ("RTX 6000 Ada", 364.2),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": ("RTX PRO 6000", 503.8),
}
UNKNOWN = ["cpu", "TPU v4 lite", "TPU v3", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 D", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_known(kind):
    name, tera = KINDS[kind]
    chip = lookup(kind, "bfloat16")
    assert (chip.name, chip.peak_flops) == (name, pytest.approx(tera * 1e12))
    single = lookup(kind, "float32")
    assert chip.peak_flops / single.peak_flops == pytest.approx(1 if "TPU" in kind else 2, rel=1e-3)
    assert 16 * 2**30 <= chip.hbm_bytes <= 192 * 2**30
    assert 8e11 <= chip.hbm_bandwidth <= 8e12


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_is_none(kind):
    assert lookup(kind, "float32") is None


def test_dtype():
    assert lookup("TPU v4", "float16") == lookup("TPU v4", "bfloat16")
    with pytest.raises(ValueError, match="use bfloat16 or float32"):
        lookup("TPU v4", "int8")
