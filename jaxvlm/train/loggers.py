"""Loggers: TensorBoard, Weights & Biases, MLflow, Trackio and Prometheus, each on request."""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvlm.config import Config, ConfigError
from jaxvlm.train.metrics import Logger


def start_loggers(config: Config, folder: Path, resume_step: int) -> list[Logger]:
    """Start the loggers that the settings name; process 0 alone has some.

    Args:
        config: of the run.
        folder: of the run; the ids of its charts are kept there.
        resume_step: the step that was restored; below 0 for a new run.

    Raises:
        ConfigError: a package is missing, or a port is taken.
    """
    if jax.process_index():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Logger] = []
    if config.wandb_project:
        started.append(WandbLogger(config.wandb_project, folder))
    if config.mlflow_experiment:
        started.append(MLflowLogger(config.mlflow_experiment, folder))
    if config.trackio_project:
        started.append(TrackioLogger(config.trackio_project, folder))
    if config.prometheus_port:
        started.append(PrometheusLogger(config.prometheus_port))
    if config.tensorboard:
        started.append(TensorBoardLogger(folder, resume_step))
    return started


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

    def close(self) -> None:
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

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MLflowLogger:
    """MLflow, on the server or folder that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, experiment: str, folder: Path):
        self._mlflow = _module("mlflow", "mlflow_experiment", experiment)
        self._client = self._mlflow.MlflowClient()
        known, id_file = self._client.get_experiment_by_name(experiment), folder / "mlflow_run_id"
        if id_file.is_file():
            self._run = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=folder.name).info.run_id
        id_file.write_text(self._run, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Send scalars."""
        now = int(self._mlflow.utils.time.get_current_time_millis())
        metric = self._mlflow.entities.Metric
        # MLflow takes no other characters in names: recall@1 is recall_1 there.
        names = {name: re.sub(r"[^\w\-. :/]", "_", name) for name in values}
        rows = [metric(names[name], float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=rows)

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Send images, each under a number of its own."""
        for i, image in enumerate(images):
            self._client.log_image(self._run, image, key=f"{name}/{i}", step=step)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._run)


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

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class PrometheusLogger:
    """The latest metrics for Prometheus to fetch: ``jaxvlm_train_loss`` is ``train/loss``."""

    def __init__(self, port: int):
        self._client = _module("prometheus_client", "prometheus_port", port, "prometheus")
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

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _module(name: str, setting: str, value: Any, extra: str = "") -> Any:
    """The tracker's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"config.{setting} is {value!r}, but {name} is not installed: "
            f"pip install 'jaxvlm[{extra or name}]', or leave {setting} out"
        ) from error


def _kept_id(path: Path) -> str:
    """An id that is made once and kept in the folder: a resumed run continues its charts."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
