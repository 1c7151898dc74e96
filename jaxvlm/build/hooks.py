"""What happens around a run's steps: lines, metrics, evaluations, checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxvlm.build import cache_metrics
from jaxvlm.build.cache_metrics import LOST
from jaxvlm.build.cached import TOKENS
from jaxvlm.build.scorer import Report
from jaxvlm.config import TrainConfig
from jaxvlm.data.slots import Written
from jaxvlm.io.checkpoint import Checkpointer
from jaxvlm.parallel import distributed
from jaxvlm.plan import count
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress
from jaxvlm.types import TrainState

_SHOWN = (
    *("loss", "tokens_per_s", "pictures_per_s", "mfu", "accuracy", "learning_rate"),
    "cache/found",
    *("step_ms", "wait_ms", "host_ms", "device_ms"),
)
"""What a line for people holds; ``metrics.jsonl`` holds everything."""

_SLOW_INPUT = 0.1
"""Share of time spent waiting for data above which the log says what to change."""


@dataclasses.dataclass
class RunHooks:
    """See ``jaxvlm.train.loop.Hooks``."""

    config: TrainConfig
    writer: MetricWriter
    progress: Progress
    checkpointer: Checkpointer
    kept: Callable[[TrainState], TrainState]
    """What of a state is saved."""
    evaluate_now: Callable[[TrainState, bool], Report] | None
    """State, and whether to run the blind control too."""
    grow: Callable[[TrainState], None]
    """Lets a cache that was halved have more memory, from the next step on."""
    learning_rate: Callable[[int], float]
    flops_per_step: count.Flops
    """Model FLOPs of a mean step that encodes all its pictures, all devices."""
    keep: Callable[[Any], float]
    """Takes the visual tokens of the step that was sent last, if it gave some; gives how far such
    are, at most, from what was kept of them."""
    tiers: Callable[[], dict[str, int]]
    """Bytes of visual tokens that this process keeps, by where."""
    beside: Callable[[int], None]
    """Saves what a step's checkpoint goes with, once that is on its way."""
    told: dict[str, Any]
    """What each checkpoint says of it."""
    written: Written | None
    """Knows which pages were written; ``keep`` tells it of a step's."""
    alarm: float
    """``config.cache.alarm``, 0 never."""
    alarm_advice: str
    steps: int
    """Of the whole run; the last evaluation has the blind control beside it."""
    peak_flops: float
    """Of all devices together, a second."""
    report: Report | None = None
    """Of the state that is about to be saved."""
    last_report: Report | None = None
    best: float | None = None
    worse: int = 0
    changed: float = 0.0
    """As ``keep`` gives it, since the last line."""
    step_ms: list[float] = dataclasses.field(default_factory=list)
    """Of each line's steps, the mean."""
    evaluated: int = -1
    """Step of the last evaluation."""

    def dispatched(self, metrics: dict[str, Any]) -> None:
        """Keep what a step made of its pictures."""
        self.changed = max(self.changed, self.keep(metrics.pop(TOKENS, None)))

    def done(self, step: int, metrics: dict[str, float]) -> None:
        """What the step wrote is known to be there, if it is."""
        if lost := int(metrics.pop(LOST, 0)):
            raise TrainingStopped(
                f"step {step}: the visual tokens of {lost} pictures are not on the devices, where "
                "a step before has written them; its update is skipped. Resume from the last "
                "checkpoint, and please report it; config.cache.policy='off' does without"
            )
        if self.written is not None:
            self.written.settle(metrics["bad_in_a_row"] == 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Rates, MFU and the clock's split beside the step's own metrics."""
        seconds = metrics["step_ms"] / 1e3
        self.step_ms.append(metrics["step_ms"])
        # Nothing is counted where every step since the last line was skipped.
        tokens, pictures = metrics.pop("tokens", 0.0), metrics.pop("pictures", 0.0)
        # The tower does nothing for a picture whose tokens are kept, backwards neither.
        spared = metrics.get("cache/found", 0.0) * self.flops_per_step.vision
        if "cache/found" in metrics:
            flops, found = self.flops_per_step, metrics["cache/found"]
            spent = flops.vision, flops.total, metrics["step_ms"]
            if (longer := cache_metrics.saved(found, *spent)) is not None:
                metrics["cache/saved_ms"] = longer
            metrics |= {f"cache/{tier}_mib": size / 2**20 for tier, size in self.tiers().items()}
        if "cache/drift_most" in metrics:
            metrics["cache/drift_most"] = max(metrics["cache/drift_most"], self.changed)
            self._alarm(step, metrics["cache/drift_most"])
        values = metrics | {
            "learning_rate": self.learning_rate(step - 1 - int(metrics["skipped_updates"])),
            "tokens_per_s": tokens / seconds,
            "pictures_per_s": pictures / seconds,
            "mfu": (self.flops_per_step.total - spared) / seconds / self.peak_flops,
        }
        self.writer.write(step, {f"train/{name}": value for name, value in values.items()})
        shown = {name: values[name] for name in _SHOWN if name in values}
        if values.get("skipped_updates"):
            shown["skipped_updates"] = values["skipped_updates"]
        self.progress.update(step, shown)
        if metrics["wait_share"] > _SLOW_INPUT:
            self.progress.log(
                f"step {step}: {100 * metrics['wait_share']:.0f} % of the time is spent waiting "
                "for data; raise config.data.workers, config.data.prefetch or "
                "config.data.image_cache_mb"
            )

    def _alarm(self, step: int, drift: float) -> None:
        self.changed = 0.0
        if 0 < self.alarm < drift:
            self.progress.log(
                f"step {step}: visual tokens that were kept differ by {drift:.2g} of their norm "
                f"from what the tower makes now, more than config.cache.alarm={self.alarm:g}; "
                f"{self.alarm_advice}"
            )

    def evaluate(self, step: int, state: TrainState) -> bool:
        """Evaluate; True where ``early_stop`` evaluations in a row were no better."""
        if self.evaluate_now is None:
            return False
        self.report = self.last_report = self.evaluate_now(state, step == self.steps)
        values = {f"eval/{name}": value for name, value in self.report.metrics.items()}
        values |= {f"eval/blind/{name}": value for name, value in self.report.blind.items()}
        self.writer.write(step, values)
        for line in self.report.lines():
            self.progress.log(f"step {step}: {line}")
        self.evaluated = step
        score = self.report.metrics[self.config.checkpoint.metric]
        sign = 1 if self.config.checkpoint.mode == "max" else -1
        better = self.best is None or sign * score > sign * self.best
        if better and math.isfinite(score):  # what is no number is never the best
            self.best, self.worse = score, 0
        else:
            self.worse += 1
        if self.exhausted() and not self.report.blind:  # so this was the last one
            self.last_report = self.evaluate_now(state, True)
        return self.exhausted()

    def exhausted(self) -> bool:
        """Whether ``early_stop`` evaluations in a row were no better."""
        return bool(self.config.early_stop) and self.worse >= self.config.early_stop

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Start writing a checkpoint; the last evaluation's figures belong to it."""
        metrics = dict(self.report.metrics) if self.report is not None else {}
        self.report = None
        extra = {"data": data, "best": self.best, "worse": self.worse}
        extra |= {"evaluated": self.evaluated} | self.told
        if self.checkpointer.save(step, self.kept(state), extra, metrics):
            self.beside(step)
        self.grow(state)

    def should_stop(self, step: int) -> bool:
        """Whether SIGTERM came, to any process."""
        return distributed.should_stop(step)

    def bad_step(self, step: int, what: str) -> None:
        """Name a skipped update."""
        self.progress.log(f"step {step}: {what}")
