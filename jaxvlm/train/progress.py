"""Progress of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

# Metric name, label, number format.
COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("tokens_per_s", "tok/s", "{}"),
    ("images_per_s", "img/s", "{}"),
    ("mfu", "MFU", "{:.1%}"),
)


class Progress:
    """Shows a run's progress. Only process 0 prints; elsewhere every call does nothing."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        title: str = "train",
        console: Console | None = None,
        name: str = "",
    ):
        """Start the bar.

        Args:
            total: steps of the whole run.
            start: steps already taken when the run resumed.
            title: label in front of the bar.
            console: where to print; stderr by default, so that stdout has results only.
            name: in front of each line, where one process has several runs.
        """
        self._console = console or Console(stderr=True, emoji=False)
        self._active = jax.process_index() == 0
        self._total, self._start, self._title = total, start, named(name, title)
        self._name = name
        self._begun = time.monotonic()
        self._bar: Bar | None = None
        if self._active and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._title, total=total, completed=start, values="")
            self._bar.start()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a step.

        Args:
            step: steps taken so far.
            values: metrics to show; ``loss``, ``tokens_per_s``, ``images_per_s`` and ``mfu``
                (a fraction of 1) come first, in this order; others follow under their own names.
        """
        if not self._active:
            return
        shown = summary(values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, values=shown)
            return
        left = time_left(time.monotonic() - self._begun, step - self._start, self._total - step)
        self._print(f"{self._title} {step}/{self._total} {shown} left {left}")

    def log(self, line: str) -> None:
        """Print a line above the bar."""
        if self._active:
            self._print(named(self._name, line))

    def close(self) -> None:
        """Stop the bar in its current state; calling it again does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._active = False

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def named(name: str, line: str) -> str:
    """A line with the name of what it is about in front, if it has one."""
    return f"{name}: {line}" if name else line


def summary(values: Mapping[str, Any]) -> str:
    """Format ``values`` in one short line: ``loss 0.1234 tok/s 12.3k img/s 45.0 MFU 41.0%``."""
    parts = []
    known = {name for name, _, _ in COLUMNS}
    for name, title, form in COLUMNS:
        if name in values:
            number = float(values[name])
            parts.append(f"{title} {form.format(short(number) if form == '{}' else number)}")
    for name, value in values.items():
        if name not in known:
            parts.append(f"{name} {value if isinstance(value, str) else short(float(value))}")
    return " ".join(parts)


def short(number: float | int) -> str:
    """Format a number with three digits and a unit: 12345 -> ``12.3k``."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def time_left(seconds: float | int, done: int, remaining: int) -> str:
    """Estimate the remaining time from the mean so far: ``1:02:03``, or ``?`` at first.

    Args:
        seconds: seconds spent on ``done`` steps.
        done: steps taken in that time.
        remaining: steps left.
    """
    if done <= 0:
        return "?"
    return time_text(seconds / done * max(remaining, 0))


def time_text(seconds: float) -> str:
    """Format a time: ``1:02:03``, or ``2:03`` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
