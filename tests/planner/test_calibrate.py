"""Measured rates: saved, loaded and used."""

from __future__ import annotations

import itertools
import json

import jax
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import calibrate


def table(*names):
    return {"float32": {name: {64: 1e9, 256: 4e9} for name in names}}


RATES = calibrate.Rates(
    "cpu", "0.1", table(*calibrate.PRODUCTS), table(*calibrate.SCORES), {4: 1.0, 16: 3.0}, 1e8, 2e8,
    0.0,
)  # fmt: skip


def found(path, kind="cpu", version="0.1"):
    return calibrate.load(lambda name: name == kind, version, path)


def test_saving_rates_keeps_those_of_other_devices(tmp_path):
    path = tmp_path / "new" / "rates.json"
    assert found(path) is None
    assert calibrate.save(RATES, path) == path and found(path) == RATES
    calibrate.save(RATES._replace(jax="0.2"), path)
    calibrate.save(RATES._replace(softmax=5.0), path)
    assert found(path).softmax == 5.0 and found(path, version="0.2") == RATES._replace(jax="0.2")
    assert found(path, "gpu") is None and found(path, version="0.3") is None
    assert [p.name for p in path.parent.iterdir()] == ["rates.json"]


def test_the_users_file_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibrate.save(RATES) == tmp_path / "jaxvlm" / "calibration.json"
    assert found("") == RATES


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "rates": [{"kind": "cpu"}]}', "{"])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rates\.json: not a file of measured rates; remove it"):
        found(path)
    with pytest.raises(ConfigError, match="not a file of measured rates"):
        calibrate.save(RATES, path)
    assert path.read_text() == text


def test_rates_of_another_format_are_ignored(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"format": 99, "rates": "anything"}))
    assert found(path) is None


def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/rates\.json: rates can't be written there"):
        calibrate.save(RATES, tmp_path / "file" / "rates.json")


def test_rates_are_interpolated_and_constant_beyond_the_measured_sizes():
    assert RATES.product("float32", "forward", 128) == pytest.approx(2e9)
    assert RATES.product("float32", "weight", 8) == 1e9
    assert RATES.score("float32", "back", 4096) == 4e9
    assert RATES.moved(8) == pytest.approx(3**0.5)


def test_the_best_of_some_repeats_counts():
    # Each reading of this clock is later than the one before; the third span is the shortest.
    ticks = itertools.accumulate([0, 9, 0, 7, 0, 2, 0, 5])
    run = calibrate._Timer(jax.devices()[0], 3, lambda: float(next(ticks)))
    assert run(lambda: jax.numpy.zeros(()), least=0.0) == 2.0


@pytest.mark.long
def test_this_machine_is_measured():
    rates = calibrate.measure(jax.devices()[:2], dtypes=("float32",), repeats=1)
    assert rates.kind == calibrate.cpu_kind() and rates.jax == jax.__version__
    for tables in (rates.matmul, rates.scores):
        for of in tables["float32"].values():
            assert all(1e8 < rate < 1e14 for rate in of.values())
    assert all(1e8 < rate < 1e13 for rate in rates.memory.values())
    assert 1e6 < rates.softmax < 1e12 and 1e6 < rates.activation < 1e12 and rates.links > 1e6


def test_all_cores_count_if_the_os_reports_no_affinity(monkeypatch):
    monkeypatch.delattr(calibrate.os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(calibrate.os, "cpu_count", lambda: 12)
    assert calibrate.cpu_kind().endswith(" x 12")
