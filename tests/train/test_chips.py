"""Device kinds as JAX spells them match their row, and only theirs."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxvlm.config import MeshConfig
from jaxvlm.models.model_flops import Flops
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.train import chips
from jaxvlm.train.chips import PeakRate, lookup
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.trainer.callbacks import metrics
from jaxvlm.trainer.callbacks.metrics import MetricsCallback

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


def peak_that_measures(monkeypatch, *rates):
    """A CPU's peak whose matmuls, one after the other, have these FLOP/s."""
    left = list(rates)
    monkeypatch.setattr(chips, "_measured", lambda *_: left.pop(0))
    return PeakRate([make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])], "float32")


def test_a_rate_that_a_run_beats_is_measured_again(monkeypatch):
    peak = peak_that_measures(monkeypatch, 1e9, 4e9, 3e9, 2e9)
    assert peak.share(0.5e9) == 0.5 and peak.flops == 1e9
    assert peak.share(2e9) == 0.5 and peak.flops == 4e9
    # Two measurements are left, then one, then none.
    assert peak.share(8e9) is None and peak.share(6e9) is None and peak.share(5e9) is None
    assert peak.flops == 4e9 and peak.share(4e9) == 1.0


def test_what_can_not_be_measured_again_is_not_shown(monkeypatch):
    peak = peak_that_measures(monkeypatch, 1e9)

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(chips, "_measured", fail)
    assert peak.share(2e9) is None and peak.share(0.5e9) == 0.5


@pytest.mark.parametrize(
    "every, said",
    [
        ([9.0], None),
        (
            [9.0, 150.0],
            "process 1 keeps the devices waiting 150 ms a step, the median of the others 9",
        ),
        ([200.0, 9.0, 9.0, 10.0], "process 0 keeps the devices waiting 200 ms a step"),
        ([9.0, 100.0], None),  # less than a tenth of the step
    ],
)
def test_the_process_that_keeps_all_waiting_is_named(monkeypatch, tmp_path, every, said):
    monkeypatch.setattr(metrics.processes, "from_every_process", lambda ms: np.asarray(every))
    out, writer = io.StringIO(), MetricWriter(tmp_path)
    with Progress(9, console=Console(file=out, width=200)) as progress:
        logs = MetricsCallback(
            writer, progress, lambda step: 0.1, Flops(0.0, 0.0, 0.0, 0.0),
            peak_that_measures(monkeypatch, 1e9),
        )  # fmt: skip
        line = {"step_ms": 1000.0, "skipped_updates": 0, "wait_share": 0.0, "loss": 1.0}
        logs.on_log(1, line | {"wait_ms": 5.0, "host_ms": 4.0})
        assert "keeps the devices" not in out.getvalue(), "the first steps warm up"
        logs.on_log(2, line | {"wait_ms": 5.0, "host_ms": 4.0})
    writer.close()
    assert (said in out.getvalue()) if said else ("keeps the devices" not in out.getvalue())
    _, row = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row.get("train/slowest_process_ms") == (max(every) if len(every) > 1 else None)


def test_no_mfu_above_one_is_logged(monkeypatch, tmp_path):
    """Flops of 1e9 a step, whose time a line has; the measured peak is 1e9, then 2e9."""
    peak, out = peak_that_measures(monkeypatch, 1e9, 2e9, 2e9, 2e9), io.StringIO()
    writer = MetricWriter(tmp_path)
    with Progress(9, console=Console(file=out, width=200)) as progress:
        flops = Flops(vision=0.0, connector=0.0, decoder=1e9, head=0.0)
        logs = MetricsCallback(writer, progress, lambda step: 0.1, flops, peak)
        for step, ms in enumerate((2000, 800, 400, 400, 1000), 1):
            line = {
                "step_ms": float(ms),
                "skipped_updates": 0,
                "wait_share": 0.0,
                "loss": 1.0,
                "wait_ms": 0.0,
                "host_ms": 0.0,
            }
            logs.on_log(step, line)
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("train/mfu") for row in rows] == [0.5, 0.625, None, None, 0.5]
    said = out.getvalue()
    assert said.count("measured again: 2.") == 1 and said.count("no MFU is shown") == 1
    assert "MFU 50.0%" in said and "125" not in said
