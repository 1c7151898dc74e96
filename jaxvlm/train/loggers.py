"""Loggers: TensorBoard, Weights & Biases, MLflow, Trackio and Prometheus, each on request."""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError
from jaxvlm.train.metrics import Logger


def start_loggers(
    config: Config, folder: Path, resume_step: int, say: Callable[[str], None]
) -> list[Logger]:
    """Start the loggers that the settings name; process 0 alone has some.

    Args:
        config: of the run.
        folder: of the run; the ids of its charts are kept there.
        resume_step: the step that was restored; below 0 for a new run.
        say: prints a line, from another thread too.

    Raises:
        ConfigError: a package is missing, a port is taken, or a tracker can't be reached.
    """
    if jax.process_index():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Logger] = []
    try:
        if config.prometheus_port:
            started.append(PrometheusLogger(config.prometheus_port))
        for setting, logger in _TRACKERS.items():
            if name := getattr(config, setting):
                start = functools.partial(logger, name, folder)
                started.append(InBackground(setting, name, start, say))
        if config.tensorboard:
            started.append(TensorBoardLogger(folder, resume_step))
    except BaseException:
        for one in started:
            one.close("")
        raise
    return started


def check_installed(config: Config, settings: Sequence[str]) -> None:
    """Refuse loggers whose packages are missing.

    Args:
        config: of the run.
        settings: those that ask for a logger.

    Raises:
        ConfigError: names the first one.
    """
    for setting in settings:
        if setting in _MODULES:
            _module(_MODULES[setting], setting, getattr(config, setting))


class InBackground:
    """Calls a tracker's logger in a thread: what it waits for or fails at costs no step.

    Args:
        setting: that names the tracker, for messages.
        name: its value.
        start: starts the logger, in the thread that calls this.
        say: prints a line.

    Raises:
        ConfigError: it can't be started.
    """

    MOST = 10_000
    """Calls that wait; later ones are dropped."""
    CLOSE_S = 120.0
    """Seconds that a run's end waits for what was not sent yet."""

    def __init__(
        self, setting: str, name: str, start: Callable[[], Logger], say: Callable[[str], None]
    ):
        self.what, self.say = f"config.{setting}={name!r}", say
        try:
            self._logger = start()
        except ConfigError:
            raise
        except Exception as error:  # whatever a tracker raises
            raise ConfigError(f"{self.what}: {_first_line(error)}") from error
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(self.MOST)
        self._lost = 0
        self._thread = threading.Thread(target=self._send, daemon=True, name=setting)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Have scalars sent."""
        self._put(lambda: self._logger.write(step, values))

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Have images sent."""
        self._put(lambda: self._logger.images(step, name, images))

    def close(self, ended: str) -> None:
        """Wait until all is sent, for two minutes at most."""
        self._put(lambda: self._logger.close(ended))
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self.CLOSE_S)
        self._thread.join(self.CLOSE_S)
        if self._thread.is_alive():
            self._lost += self._waiting.qsize()
        if self._lost:
            self.say(f"{self.what}: {self._lost} messages could not be sent; metrics.jsonl has all")

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._lost += 1

    def _send(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever a tracker raises
                if not self._lost:
                    self.say(f"{self.what}: {_first_line(error)}; the run goes on without")
                self._lost += 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class TensorBoardLogger:
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self, folder: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        # purge_step makes TensorBoard discard the events of later steps.
        first = resume_step + 1 if resume_step >= 0 else 0
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Write images."""
        self._writer.add_images(name, images, step, dataformats="NHWC")

    def close(self, ended: str) -> None:
        """Close the file."""
        self._writer.close()


class WandbLogger:
    """Weights & Biases, over the metric ``step``."""

    def __init__(self, project: str, folder: Path):
        self._wandb = _module("wandb", "wandb_project", project)
        where = {"project": project, "dir": str(folder), "name": folder.name}
        self._run = self._wandb.init(**where, id=_kept_id(folder / "wandb_id"), resume="allow")
        # W&B's own step may only rise, and it drops what is logged below it: the steps that a run
        # trains again after a kill. Charts are over our step instead.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Send scalars."""
        self._run.log({"step": step, **values})

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Send images."""
        self._run.log({"step": step, name: [self._wandb.Image(image) for image in images]})

    def close(self, ended: str) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if ended else 1)


class MLflowLogger:
    """MLflow, on the server or folder that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, experiment: str, folder: Path):
        self._mlflow = _module("mlflow", "mlflow_experiment", experiment)
        self._client = self._mlflow.MlflowClient()
        known, id_file = self._client.get_experiment_by_name(experiment), folder / "mlflow_run_id"
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        if id_file.is_file():
            self._run = id_file.read_text(encoding="utf-8").strip()
            if self._client.get_run(self._run).info.experiment_id != number:
                raise ConfigError(
                    f"config.mlflow_experiment={experiment!r}, but the run's metrics are in another"
                    f" experiment; name that one, or remove {id_file} to begin a run in this one"
                )
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=folder.name).info.run_id
        id_file.write_text(self._run, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Send scalars."""
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        # MLflow takes no other characters in names: recall@1 is recall_1 there.
        names = {name: re.sub(r"[^\w\-. :/]", "_", name) for name in values}
        rows = [metric(names[name], float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=rows)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Send images, each under a number of its own."""
        for i, image in enumerate(images):
            self._client.log_image(self._run, image, key=f"{name}/{i}", step=step)

    def close(self, ended: str) -> None:
        """Say how the run has ended."""
        status = {"": "FAILED", "preempted": "KILLED"}.get(ended, "FINISHED")
        self._client.set_terminated(self._run, status)


class TrackioLogger:
    """Trackio: a local database, or a Space with ``TRACKIO_SPACE_ID``."""

    def __init__(self, project: str, folder: Path):
        self._trackio = _module("trackio", "trackio_project", project)
        name = f"{folder.name}-{_kept_id(folder / 'trackio_id')[:8]}"
        self._run = self._trackio.init(project=project, name=name, resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Send scalars."""
        self._run.log(dict(values), step=step)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Send images, each under a number of its own."""
        image = self._trackio.Image
        self._run.log({f"{name}/{i}": image(x) for i, x in enumerate(images)}, step=step)

    def close(self, ended: str) -> None:
        """Send what is left."""
        self._run.finish()


class PrometheusLogger:
    """The latest metrics for Prometheus to fetch: ``jaxvlm_train_loss`` is ``train/loss``."""

    def __init__(self, port: int):
        self._client = _module("prometheus_client", "prometheus_port", port)
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(
                port, registry=self._registry
            )
        except OSError as error:
            raise ConfigError(
                f"config.prometheus_port={port}: {error.strerror}; choose another port"
            ) from None

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Set the gauges, and ``jaxvlm_step``."""
        for name, value in {"step": step, **values}.items():
            plain = "jaxvlm_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
            if plain not in self._gauges:
                gauge = self._client.Gauge(plain, name, registry=self._registry)
                self._gauges[plain] = gauge
            self._gauges[plain].set(value)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Prometheus has none."""

    def close(self, ended: str) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_MODULES = {
    "wandb_project": "wandb",
    "mlflow_experiment": "mlflow",
    "trackio_project": "trackio",
    "prometheus_port": "prometheus_client",
}
"""Setting -> the package of its logger."""
_EXTRAS = {"prometheus_client": "prometheus"}
"""Package -> the extra that brings it, where its name is another."""
_TRACKERS: Mapping[str, Callable[[str, Path], Logger]] = {
    "wandb_project": WandbLogger,
    "mlflow_experiment": MLflowLogger,
    "trackio_project": TrackioLogger,
}
"""Setting -> the logger that it starts."""


def _module(name: str, setting: str, value: Any) -> Any:
    """The tracker's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"config.{setting} is {value!r}, but {name} is not installed: "
            f"pip install 'jaxvlm[{_EXTRAS.get(name, name)}]', or leave {setting} out"
        ) from error


def _kept_id(path: Path) -> str:
    """An id that is made once and kept in the folder: a resumed run continues its charts."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
