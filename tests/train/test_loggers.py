"""Loggers get each number once a step, and a resumed run goes on in its own charts.

MLflow and Trackio themselves, with ``pip install 'jaxvlm[mlflow,trackio]'``: ``-m exhaustive``.
"""

from __future__ import annotations

import inspect
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
from runs import free_port

from jaxvlm.config import Config, ConfigError
from jaxvlm.train import loggers
from jaxvlm.train.loggers import InBackground, TensorBoardLogger, start_loggers
from jaxvlm.train.metrics import Logger, MetricWriter

said: list[str] = []


@pytest.fixture(autouse=True)
def nothing_said():
    said.clear()


def writer(folder, resume_step=-1, **settings):
    config = Config(**{"tensorboard": False} | settings)
    return MetricWriter(
        folder, resume_step, start_loggers(config, folder, resume_step, said.append)
    )


def test_tensorboard_events(tmp_path):
    made = writer(tmp_path, tensorboard=True)
    made.write(3, {"train/loss": 0.25})
    made.images(3, "eval/samples", np.zeros((2, 4, 5, 3), np.uint8))
    made.images(3, "eval/one", np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="images must be u8"):
        made.images(3, "eval/bad", np.zeros((4, 5, 3)))
    made.close()
    data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    for tag in (b"train/loss", b"eval/samples", b"eval/one"):
        assert tag in data


TRACKERS = {
    "wandb_project": ("wandb", "wandb"),
    "mlflow_experiment": ("mlflow", "mlflow"),
    "trackio_project": ("trackio", "trackio"),
    "prometheus_port": ("prometheus_client", "prometheus"),
}


@pytest.mark.parametrize("setting", TRACKERS)
def test_a_missing_package_is_named(tmp_path, monkeypatch, setting):
    module, extra = TRACKERS[setting]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'jaxvlm\[{extra}\]'"):
        writer(tmp_path, **{setting: 9 if setting == "prometheus_port" else "p"})


def test_wandb_gets_the_numbers(tmp_path, monkeypatch):
    logged, started, axes = [], [], []

    class Wandb:
        Image = staticmethod(lambda image: image.shape)

        def init(self, **settings):
            started.append(settings["id"])
            return self

        def define_metric(self, name, **settings):
            axes.append((name, settings))

        def log(self, values):
            logged.append(values)

        def finish(self, exit_code):
            logged.append(f"finished {exit_code}")

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    made = writer(tmp_path, wandb_project="p")
    made.write(1, {"train/loss": 2.0, "note": "x"})
    made.images(1, "eval/one", np.zeros((4, 5, 3), np.uint8))
    made.close()  # it failed
    assert logged == [
        {"step": 1, "train/loss": 2.0}, {"step": 1, "eval/one": [(4, 5, 3)]}, "finished 1",
    ]  # fmt: skip
    assert axes[-1] == ("*", {"step_metric": "step"}), "charts are over our step"
    # After a kill, step 1 is trained again: W&B's own step, which only rises, is not used.
    made = writer(tmp_path, 0, wandb_project="p")
    made.write(1, {"train/loss": 2.0})
    made.ended = "done"
    made.close()
    assert logged[-2:] == [{"step": 1, "train/loss": 2.0}, "finished 0"] and not said
    assert started[0] == started[1] != "", "a resumed run goes on in its own chart"


class Failing:
    """A tracker that does not answer after the first call, or hangs until ``free`` is set."""

    def __init__(self, free=None):
        self.calls, self.free = 0, free

    def write(self, step, values):
        self.calls += 1
        if self.free:
            self.free.wait()
        if self.calls > 1:
            raise ConnectionError("no route to host\nand more")

    def images(self, step, name, images):
        self.write(step, {})

    def close(self, ended):
        self.write(0, {})


def test_a_tracker_that_fails_stops_no_run(tmp_path):
    made = InBackground("mlflow_experiment", "e", Failing, said.append)
    for step in range(5):
        made.write(step, {"train/loss": 1.0})
    made.close("done")
    assert said == [
        "config.mlflow_experiment='e': no route to host; the run goes on without",
        "config.mlflow_experiment='e': 5 messages could not be sent; metrics.jsonl has all",
    ]


def test_a_tracker_that_hangs_costs_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(InBackground, "MOST", 3)
    monkeypatch.setattr(InBackground, "CLOSE_S", 0.2)
    free = threading.Event()
    made = InBackground("wandb_project", "p", lambda: Failing(free), said.append)
    for step in range(20):  # none of these waits for it
        made.write(step, {"train/loss": 1.0})
    made.close("done")
    assert "messages could not be sent; metrics.jsonl has all" in said[-1]
    free.set()
    made._thread.join(timeout=30)


def test_one_that_can_not_be_started_is_named(tmp_path):
    def start():
        raise ConnectionError("no route to host")

    with pytest.raises(ConfigError, match=r"config.trackio_project='p': no route to host"):
        InBackground("trackio_project", "p", start, said.append)


def test_what_was_started_is_closed_where_another_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    port = free_port()
    with pytest.raises(ConfigError, match="mlflow"):
        writer(tmp_path, prometheus_port=port, mlflow_experiment="e")
    writer(tmp_path, prometheus_port=port).close()


def fetched(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_fetches_the_latest(tmp_path):
    port = free_port()
    made = writer(tmp_path, prometheus_port=port)
    made.write(3, {"train/loss": 2.0, "eval/recall@1": 0.5, "note": "x"})
    made.write(4, {"train/loss": 1.5})
    made.images(4, "eval/one", np.zeros((4, 5, 3), np.uint8))
    text = fetched(port)
    for line in ("jaxvlm_train_loss 1.5", "jaxvlm_eval_recall_1 0.5", "jaxvlm_step 4.0"):
        assert f"\n{line}\n" in text
    assert "note" not in text and "python_" not in text
    with pytest.raises(ConfigError, match=f"config.prometheus_port={port}: Address already in use"):
        writer(tmp_path, prometheus_port=port)
    made.close()
    with pytest.raises(urllib.error.URLError):
        fetched(port)


@pytest.mark.exhaustive
def test_mlflow_has_the_numbers_of_both_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(None)
    folder = tmp_path / "run"
    for resume_step, steps in ((-1, (1, 2, 3)), (1, (2, 3))):
        made = writer(folder, resume_step, mlflow_experiment="e")
        for step in steps:
            made.write(step, {"train/loss": step + 10 * (resume_step > 0), "eval/recall@1": 0.5})
        made.images(3, "eval/samples", np.zeros((2, 4, 5, 3), np.uint8))
        made.ended = "done"
        made.close()
    with pytest.raises(ConfigError, match="the run's metrics are in another experiment"):
        writer(folder, mlflow_experiment="f")
    assert not said
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((x.step, x.value) for x in history) == [(1, 1), (2, 2), (2, 12), (3, 3), (3, 13)]
    assert "eval/recall_1" in run.data.metrics


@pytest.mark.exhaustive
def test_trackio_has_the_numbers_of_both_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run"
    for resume_step, steps in ((-1, (1, 2, 3)), (1, (2, 3))):
        made = writer(folder, resume_step, trackio_project="p")
        for step in steps:
            made.write(step, {"train/loss": step + 10 * (resume_step > 0)})
        made.images(3, "eval/samples", np.zeros((2, 4, 5, 3), np.uint8))
        made.close()
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_runs("p")
    logs = SQLiteStorage.get_logs("p", run)
    rows = [(x["step"], x["train/loss"]) for x in logs if "train/loss" in x]
    assert sorted(rows) == [(1, 1), (2, 2), (2, 12), (3, 3), (3, 13)]


def test_loggers_have_the_protocols_methods():
    for kind in (TensorBoardLogger, InBackground, *loggers._TRACKERS.values()):
        for name in ("write", "images", "close"):
            wanted = inspect.signature(getattr(Logger, name)).parameters
            assert list(inspect.signature(getattr(kind, name)).parameters) == list(wanted)
