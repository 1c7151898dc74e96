"""Logs a run's metrics: rates, MFU, learning rate, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable

from jaxvlm.models.model_flops import Flops
from jaxvlm.train.callbacks import Callback
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.progress import Progress

_SHOWN = (
    *("loss", "tokens_per_s", "images_per_s", "mfu", "accuracy", "learning_rate"),
    "cache/hit_rate",
    *("step_ms", "wait_ms", "host_ms", "device_ms"),
)
"""What a line for people holds; ``metrics.jsonl`` holds everything."""

_SLOW_INPUT = 0.1
"""Share of the time spent waiting for data above which the log says what to change."""


class MetricsCallback(Callback):
    """Writes each line's metrics; stands after the callbacks that add to them.

    Args:
        writer: ``metrics.jsonl`` and the trackers.
        progress: lines for people.
        learning_rate: updates so far -> the learning rate of the next one.
        flops_per_step: model FLOPs of a mean step that encodes all its images, on all devices.
        peak_flops: FLOP/s that all devices together reach at best, the denominator of MFU.
    """

    def __init__(
        self,
        writer: MetricWriter,
        progress: Progress,
        learning_rate: Callable[[int], float],
        flops_per_step: Flops,
        peak_flops: float,
    ):
        self.writer, self.progress, self.learning_rate = writer, progress, learning_rate
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the means since the last line."""
        seconds = metrics["step_ms"] / 1e3
        # Nothing is counted where every step since the last line was skipped.
        tokens, images = metrics.pop("tokens", 0.0), metrics.pop("images", 0.0)
        # The vision encoder does nothing for a cache hit, in the backward pass neither.
        spared = metrics.get("cache/hit_rate", 0.0) * self.flops_per_step.vision
        values = metrics | {
            "learning_rate": self.learning_rate(step - 1 - int(metrics["skipped_updates"])),
            "tokens_per_s": tokens / seconds,
            "images_per_s": images / seconds,
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

    def on_bad_step(self, step: int, what: str) -> None:
        """Name a skipped update."""
        self.progress.log(f"step {step}: {what}")
