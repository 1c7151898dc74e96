"""Machines by name: those that can be rented, and errors for those that can't."""

from __future__ import annotations

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import calibrate, machine

KNOWN = {
    # (devices, a host's, hosts, island, torus), from the makers' pages
    "h200:8": (8, 8, 1, 8, ""),
    "H100:64": (64, 8, 8, 8, ""),
    "h200": (1, 1, 1, 1, ""),
    "gb200:72": (72, 4, 18, 72, ""),
    "v5p:2x2x4": (16, 4, 4, 16, "2x2x4"),
    "v5p:4x2x2": (16, 4, 4, 16, "2x2x4"),
    "v5e:16": (16, 8, 2, 16, "4x4"),
    "2xv5e:16x16": (512, 8, 64, 256, "16x16"),
    "7x:2x2x1": (8, 8, 1, 8, "2x2x1"),
    "tpu7x:8": (8, 8, 1, 8, "2x2x1"),
    "cpu:8": (8, 8, 1, 8, ""),
}


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("text", KNOWN)
def test_spellings(text):
    m = machine.parse(text)
    assert (m.devices, m.devices_per_host, m.hosts, m.island, m.topology) == KNOWN[text]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2000:8", "unknown chip 'h2000'; did you mean h200 or "),
        ("mi300x:8", "unknown chip 'mi300x'.*known: v4, v5e"),
        ("h200:9", "a host has 8 .*nearest: 8 or 16"),
        ("gb200:76", "an NVLink domain has 72 GPUs.*nearest: 72 or 144"),
        ("h200:6", "one rents 1, 2, 4, 8; nearest: 4 or 8"),
        ("h200:0", "zero devices"),
        ("cpu:0", "zero devices"),
        ("v5p:0x2x2", "zero devices"),
        ("0xv5e:4", "zero slices"),
        ("v5p:3x3x3", r"no such slice.*nearest: .*2x4x4 \(32 chips\)"),
        ("v5e:12", r"no such slice.*2x4 \(8 chips\), 4x4 \(16 chips\)"),
        ("7x:3", "a chip is 2 JAX devices"),
        ("2xh100:8", "GPUs are given by their number, as in h100:8"),
        ("h200:2x2", "GPUs are given by their number"),
        ("cpu:2x2", "CPU devices are given by their number"),
        ("h200:", "is no machine; use h200:8"),
        ("", "is no machine"),
    ],
)
def test_an_unknown_machine_is_a_one_line_error(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        machine.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [name for name in machine.names() if name != "cpu"])
def test_every_kind_has_its_figures_or_names_the_missing_ones(kind):
    size = {"v5e": "16x16", "v6e": "16x16", "gb200": "144"}.get(kind, "16")
    m = machine.parse(f"2x{kind}:{size}" if "v" in kind or kind == "7x" else f"{kind}:{size}")
    assert m.chip.peak_flops and m.chip.hbm_bytes and m.chip.hbm_bandwidth and m.slices > 1
    assert bool(m.network) == (not any("network" in name for name in m.missing))
    assert bool(m.links) == (not any("fast links" in name for name in m.missing))
    assert m.network < m.links  # else what is slow would be fast


def test_attention_depends_on_the_gpu_generation():
    shares = {k: machine.parse(k).shares.scores for k in ("a100", "h100", "h200", "b200", "gb200")}
    assert shares == {"a100": 0.6, "h100": 0.52, "h200": 0.52, "b200": 0.55, "gb200": 0.55}
    assert machine.parse("v5p:8").shares.scores == machine.parse("v5p:8").shares.matmul


def test_wrap_around_links_of_a_pod_s_side_and_none_of_one_chip():
    assert machine.parse("v5e:8x16").links == 150e9
    assert machine.parse("v5p:2x2x1").links == pytest.approx(200e9)
    assert machine.parse("v5e:1x1").missing == machine.parse("2xv5e:1x1").missing == ()


def test_pcie_cards_have_slower_links_than_nvlink():
    assert machine.parse("a100-pcie-40gb:8").links < machine.parse("a100-40gb:8").links / 9
    assert machine.parse("rtx4090:8").links < machine.parse("rtx6000ada:8").links


def test_links_of_a_slice_without_wrap_around_count_half():
    small, whole = machine.parse("v5e:4x4"), machine.parse("v5e:16x16")
    assert (small.links, whole.links) == (100e9, 200e9)
    assert machine.parse("v5p:2x2x2").links * 2 == machine.parse("v5p:4x4x4").links == 600e9


def rates(kind="cpu", jax="0", **more):
    table = {name: {64: 1e9, 256: 4e9} for name in calibrate.PRODUCTS}
    scores = {name: {64: 2e9} for name in calibrate.SCORES}
    made = calibrate.Rates(
        kind, jax, {"float32": table}, {"float32": scores}, {4096: 8e9, 2**24: 2e9}, 1e8, 2e8, 1e9
    )
    return made._replace(**more)


def test_measured_rates_replace_assumed_ones():
    assert machine.parse("cpu:2", "float32").missing
    m = machine.parse("cpu:2", "float32", rates())
    assert not m.missing and m.chip.peak_flops == 4e9 and m.chip.hbm_bandwidth == 2e9
    assert m.links == 1e9 and m.shares.source == "measured with JAX 0"
    gpu = machine.parse("h200:8", "float32", rates("NVIDIA H200"))
    assert gpu.chip.peak_flops > 4e14 and gpu.shares.matmul == 4e9 / gpu.chip.peak_flops
    # bfloat16 was not measured there
    assert machine.parse("h200:8", "bfloat16", rates("NVIDIA H200")).rates is None


def test_saved_rates_are_loaded_by_kind_and_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    calibrate.save(rates("NVIDIA H200"))
    calibrate.save(rates("NVIDIA H100 80GB HBM3", jax="other"))
    assert machine.parse("h200:8", "float32").rates == rates("NVIDIA H200")
    assert machine.parse("h100:8", "float32").rates is None
    assert machine.parse("cpu:1", "float32").rates is None
    calibrate.save(rates(calibrate.cpu_kind()))
    assert machine.parse("cpu:1", "float32").rates.kind == calibrate.cpu_kind()
