"""What a run writes of itself: ``metrics.jsonl`` with its loggers, and ``goodput.jsonl``."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.config import json_text

FILE = "metrics.jsonl"
GOODPUT_FILE = "goodput.jsonl"


@runtime_checkable
class Logger(Protocol):
    """Takes a run's metrics to a tracker; see ``jaxvlm.train.loggers``."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Take scalars; those of a step that is trained again come again."""
        ...

    def images(self, step: int, name: str, images: np.ndarray) -> None:
        """Take images, u8[n, H, W, 3]."""
        ...

    def close(self, ended: str) -> None:
        """Send what is left; ``ended`` is why the run ended, "" where it failed."""
        ...


class MetricWriter:
    """Writes scalars and images from process 0; in other processes every call does nothing.

    Lines after the step that the run resumes from are dropped.

    Args:
        workdir: the run's folder; created if missing.
        resume_step: the step that was restored; lines of later steps are dropped, as these steps
            are run again. Below 0 starts a new file.
        loggers: get the numbers too; used and closed in process 0 alone.
        began: when the run's process started, in seconds of ``time.time()``; by default now.
    """

    def __init__(
        self,
        workdir: str | Path,
        resume_step: int = -1,
        loggers: Sequence[Logger] = (),
        began: float | None = None,
    ):
        self._active = jax.process_index() == 0
        self._loggers = loggers
        self.ended = ""
        """Why the run ended; "" until it has, and where it failed."""
        self.goodput = Goodput(workdir, time.time() if began is None else began)
        if not self._active:
            return
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        keep_until(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

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
        for logger in self._loggers:
            logger.write(int(step), numbers)

    def images(self, step: int, name: str, array: Any) -> None:
        """Give the loggers one image or several.

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
        for logger in self._loggers:
            logger.images(int(step), name, images)

    def close(self) -> None:
        """Flush and close the file and the loggers; calling it again does nothing."""
        if not self._active:
            return
        self._active = False
        self._file.close()
        for logger in self._loggers:
            logger.close(self.ended)


STEPS, AGAIN, DOWN = "steps", "steps taken again", "between starts"
WAIT = "wait for data"
CAUSES = (
    *(STEPS, AGAIN, WAIT, "startup", "compilation", "evaluation", "checkpoint"),
    *("exchange", "end", DOWN),
)
"""What a run's time goes to, from its first start to now: training steps that count; those that
were taken after the checkpoint that a later start went on from; time in which the devices waited
for data; up to the first step, from the process's start; compiling; evaluations; what the steps
wait for of checkpoints; exchanges with islands and sites; after the last step; and the time in
which no process ran, and what a killed one had not written."""


class Goodput:
    """Where a run's time goes, over all its starts: lines of ``goodput.jsonl`` by process 0.

    Args:
        workdir: the run's folder.
        began: when this process started, in seconds of ``time.time()``.
    """

    def __init__(self, workdir: str | Path, began: float):
        self.path, self.began = Path(workdir) / GOODPUT_FILE, began
        # The clock may be set meanwhile; only its value at the start is used.
        self._ahead = time.time() - began - time.perf_counter()
        self._active = jax.process_index() == 0
        self._name = uuid.uuid4().hex[:8]
        before = list(_lines(self.path)) if self._active else []
        self._before, self._first, self._last = before, dict[str, Any](), dict[str, Any]()
        self._base = dict.fromkeys(CAUSES, 0.0)

    def begin(self, step: int) -> None:
        """Note that steps begin after ``step``."""
        self._write(step, {"startup": self._ahead + time.perf_counter()})

    def write(self, step: int, seconds: float, apart: Mapping[str, float]) -> None:
        """Write a line.

        Args:
            step: steps taken so far.
            seconds: since steps began.
            apart: cause -> seconds of these that are no part of a step.
        """
        startup = self._first["seconds"]["startup"]
        spent = {STEPS: seconds - sum(apart.values()), "startup": startup, **apart}
        self._write(step, spent)

    def end(self) -> dict[str, float]:
        """Count the time since the last line as that after the last step; return the summary."""
        if not self._last:  # no step was taken
            self.begin(0)
        spent = dict(self._last["seconds"])
        spent["end"] = self._ahead + time.perf_counter() - sum(spent.values())
        self._write(self._last["step"], spent)
        return self.summary()

    def summary(self) -> dict[str, float]:
        """Seconds by cause so far; see :func:`goodput`."""
        return {name: x + self._last["seconds"].get(name, 0.0) for name, x in self._base.items()}

    def share(self) -> float:
        """The share of the time so far that went to steps that count, 0 to 1."""
        return share(self.summary())

    def _write(self, step: int, spent: Mapping[str, float]) -> None:
        now = self.began + self._ahead + time.perf_counter()
        self._last = {
            "start": self._name, "began": round(self.began, 3), "time": round(now, 3), "step": step,
            "seconds": {name: round(value, 3) for name, value in spent.items()},
        }  # fmt: skip
        if not self._first:  # the starts before it are over: their part of the sum is known
            self._first = self._last
            own = self._first["seconds"]
            whole = goodput([*self._before, self._first])
            self._base = {name: x - own.get(name, 0.0) for name, x in whole.items()}
            self._before.clear()
        if self._active:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._last) + "\n")


def share(seconds: Mapping[str, float]) -> float:
    """The share of seconds by cause that went to steps that count, 0 to 1."""
    return seconds[STEPS] / max(sum(seconds.values()), 1e-9)


def read_goodput(workdir: str | Path) -> dict[str, float]:
    """Seconds of a run by cause, from its first start to its last line; see :func:`goodput`."""
    return goodput(_lines(Path(workdir) / GOODPUT_FILE))


def goodput(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by :data:`CAUSES` that add up to the time from the first start to the last line.

    Args:
        lines: of ``goodput.jsonl``, oldest first.
    """
    starts: list[list[Mapping[str, Any]]] = []
    for line in lines:
        if not starts or line["start"] != starts[-1][0]["start"]:
            starts.append([])
        starts[-1].append(line)
    total = dict.fromkeys(CAUSES, 0.0)
    kept_until = math.inf  # the earliest step that a later start went on from
    for i, start in reversed(list(enumerate(starts))):
        for cause, seconds in start[-1]["seconds"].items():
            total[cause] = total.get(cause, 0.0) + seconds
        kept = [line for line in start if line["step"] <= kept_until]
        counts = kept[-1]["seconds"].get(STEPS, 0.0) if kept else 0.0
        again = start[-1]["seconds"].get(STEPS, 0.0) - counts
        total[AGAIN] += again
        total[STEPS] -= again
        if i + 1 < len(starts):
            total[DOWN] += max(0.0, starts[i + 1][0]["began"] - start[-1]["time"])
        kept_until = min(kept_until, start[0]["step"])
    return total


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """The lines of a file that are whole."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json_text.parse(text)
            if {"start", "began", "time", "step", "seconds"} <= line.keys():
                yield line
        except (ValueError, TypeError, AttributeError):
            continue  # a truncated line


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
