"""Metric writers: ``metrics.jsonl`` always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.config import ConfigError, json_text

FILE = "metrics.jsonl"


class MetricWriter:
    """Writes scalars and images from process 0; in other processes every call does nothing."""

    def __init__(
        self,
        workdir: str | Path,
        tensorboard: bool = True,
        wandb_project: str = "",
        resume_step: int = -1,
    ):
        """Open the files; lines after the step that the run resumes from are dropped.

        Args:
            workdir: the run's folder; created if missing.
            tensorboard: also write TensorBoard events to ``workdir/tensorboard``.
            wandb_project: also log to this Weights & Biases project; "" is off.
            resume_step: the step that was restored; lines of later steps are dropped, as these
                steps are run again. Below 0 starts a new file.

        Raises:
            ConfigError: ``wandb_project`` is set but wandb is not installed.
        """
        self._active = jax.process_index() == 0
        self._board: Any = None
        self._wandb: Any = None
        if not self._active:
            return
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        if wandb_project:
            self._wandb = _start_wandb(wandb_project, folder)
        path = folder / FILE
        keep_until(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from tensorboardX import SummaryWriter

            # purge_step makes TensorBoard discard the events of later steps too.
            self._board = SummaryWriter(
                str(folder / "tensorboard"), purge_step=resume_step + 1 if resume_step >= 0 else 0
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line of scalars.

        Args:
            step: steps taken so far.
            values: name -> number or 0-d array; names carry their prefix (``train/loss``).
                Strings go to the file only. A non-finite number becomes "nan", "inf" or "-inf".
        """
        if not self._active:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        line |= {name: _jsonable(value) for name, value in plain.items()}
        # One write and one flush for each line: after a kill at most the last line is truncated.
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in plain.items() if not isinstance(value, str)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": int(step), **numbers})

    def images(self, step: int, name: str, array: Any) -> None:
        """Write one image or several, to TensorBoard and wandb.

        Args:
            step: steps taken so far.
            name: with prefix, e.g. ``eval/samples``.
            array: u8[H, W, 3] or u8[n, H, W, 3].
        """
        if not self._active:
            return
        images = np.asarray(array)
        images = images[None] if images.ndim == 3 else images
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise ValueError(
                f"{name}: images must be u8[n, H, W, 3], not {images.dtype}{list(images.shape)}"
            )
        if self._board is not None:
            self._board.add_images(name, images, step, dataformats="NHWC")
        if self._wandb is not None:
            import wandb

            shown = [wandb.Image(image) for image in images]
            self._wandb.log({"step": int(step), name: shown})

    def close(self) -> None:
        """Flush and close the files; calling it again does nothing."""
        if not self._active:
            return
        self._active = False
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def keep_until(path: Path, last_step: int) -> None:
    """Drop from a metrics file the lines after ``last_step``, and truncated lines.

    Args:
        path: the file; it may be missing.
        last_step: lines of this step and of earlier ones stay.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json_text.parse(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a truncated line
    write_whole(path, "".join(kept))


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """Read a run's metrics file, oldest line first; non-finite numbers become floats again."""
    path = Path(workdir) / FILE
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return [
        {
            name: words.get(value, value) if isinstance(value, str) else value
            for name, value in line.items()
        }
        for line in lines
    ]


def _plain(value: Any) -> int | float | str:
    if isinstance(value, str):
        return value
    number = np.asarray(value).item()
    return number if isinstance(number, int) else float(number)


def _jsonable(value: int | float | str) -> int | float | str:
    """Replace nan and infinities, which JSON does not have, by their names as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _start_wandb(project: str, folder: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"config.wandb_project is {project!r}, but wandb is not installed: "
            "pip install 'jaxvlm[wandb]', or leave wandb_project empty"
        ) from error
    # The id is created once and kept in the folder, so that a resumed run continues its charts.
    id_file = folder / "wandb_id"
    if not id_file.is_file():
        id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
    name = id_file.read_text(encoding="utf-8").strip()
    run = wandb.init(project=project, dir=str(folder), name=folder.name, id=name, resume="allow")
    # W&B's own step may only rise, and it drops what is logged below it: the steps that a run
    # trains again after a kill. Charts are over our step instead.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run
