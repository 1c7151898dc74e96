"""Logs a run: what is about to be trained, then rates, MFU, learning rate, and a step's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxvlm.data.conversations.mixture import MixtureOrder
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.models import model_flops
from jaxvlm.models.model_flops import Flops
from jaxvlm.parallel.distributed import processes
from jaxvlm.parallel.mesh import mesh_text
from jaxvlm.train.callbacks import Callback
from jaxvlm.train.chips import PeakRate
from jaxvlm.train.metrics import STEPS, MetricWriter, share
from jaxvlm.train.progress import Progress, time_text
from jaxvlm.trainer import embedding_run
from jaxvlm.trainer.run import Run
from jaxvlm.types import Batch, Pairs, TrainState

_SHOWN = (
    *("loss", "tokens_per_s", "images_per_s", "mfu", "accuracy", "learning_rate"),
    "cache/hit_rate",
    *("step_ms", "wait_ms", "host_ms", "device_ms"),
)
"""What a line for people holds; ``metrics.jsonl`` holds everything."""

_NOISE_MS = 50.0
"""By less than this a process may be slower in a step without a word."""
_SLOW_INPUT = 0.1
"""Share of the time spent waiting for data above which the log says what to change."""


class MetricsCallback(Callback):
    """Writes each line's metrics; stands after the callbacks that add to them.

    Args:
        writer: ``metrics.jsonl`` and the trackers.
        progress: lines for people.
        learning_rate: updates so far -> the learning rate of the next one.
        flops_per_step: model FLOPs of a mean step that encodes all its images, on all devices.
        peak: FLOP/s that all devices together reach at best, the denominator of MFU.
        read_before: step -> what the steps before it have read of each source of a mixture.
    """

    def __init__(
        self,
        writer: MetricWriter,
        progress: Progress,
        learning_rate: Callable[[int], float],
        flops_per_step: Flops,
        peak: PeakRate,
        read_before: Callable[[int], dict[str, float]] = lambda step: {},
    ):
        self.writer, self.progress, self.learning_rate = writer, progress, learning_rate
        self.flops_per_step, self.peak = flops_per_step, peak
        self.read_before = read_before
        self._has_warned, self._is_warm = False, False

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
        }
        values |= self._of_processes(step, metrics) | self.read_before(step)
        mfu = self._mfu(step, (self.flops_per_step.total - spared) / seconds)
        values |= {} if mfu is None else {"mfu": mfu}
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

    def _of_processes(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Which process keeps all the others' devices waiting, where there are several.

        What can be told apart is a step's time in which a process waits for data or is busy itself;
        its devices' own time is that of the slowest of all.
        """
        every = processes.from_every_process(metrics["wait_ms"] + metrics["host_ms"])
        if len(every) == 1:
            return {}
        slowest, most = int(np.argmax(every)), float(max(every))
        median = float(np.median(np.delete(every, slowest)))  # of the others
        is_first, self._is_warm = not self._is_warm, True  # the first steps warm up
        if not is_first and most - median > max(_SLOW_INPUT * metrics["step_ms"], _NOISE_MS):
            self.progress.log(
                f"step {step}: process {slowest} keeps the devices waiting {most:.0f} ms a step, "
                f"the median of the others {median:.0f}; look at its machine's disks and cores"
            )
        return {
            "slowest_process": float(slowest),
            "slowest_process_ms": most,
            "median_process_ms": median,
        }

    def _mfu(self, step: int, flops: float) -> float | None:
        """MFU of a run that does so many FLOP/s; ``None`` where it would be above 100 %."""
        before = self.peak.flops
        mfu = self.peak.share(flops)
        if self.peak.flops > before:
            self.progress.log(
                f"step {step}: the run beat the {self.peak.source} of {before / 1e9:.0f} GFLOP/s, "
                f"which the machine was busy for; measured again: {self.peak.flops / 1e9:.0f}. "
                "MFU was shown too high until here"
            )
        if mfu is None and not self._has_warned:
            self._has_warned = True
            self.progress.log(
                f"step {step}: {flops / 1e9:.0f} GFLOP/s are more than {self.peak.source} "
                f"({self.peak.flops / 1e9:.0f}), so no MFU is shown; step_ms is right"
            )
        return mfu

    def on_bad_step(self, step: int, what: str) -> None:
        """Name a skipped update."""
        self.progress.log(f"step {step}: {what}")

    def on_end(self, state: TrainState, result: dict[str, Any]) -> None:
        """Add where the run's time went, over all its starts."""
        self.writer.ended = result["ended"]
        seconds = self.writer.goodput.end()
        result["goodput"] = round(share(seconds), 4)
        result["goodput_seconds"] = {cause: round(x, 3) for cause, x in seconds.items()}
        self.progress.log(goodput_line(seconds))


def goodput_line(seconds: Mapping[str, float]) -> str:
    """Where a run's time went, for people: ``goodput 93 % of 2:01:05: steps ...``."""
    total = max(sum(seconds.values()), 1e-9)
    lost = sorted(((x, cause) for cause, x in seconds.items() if cause != STEPS), reverse=True)
    parts = [f"{cause} {100 * x / total:.0f} %" for x, cause in lost if x >= 0.005 * total]
    line = f"goodput {100 * share(seconds):.0f} % of {time_text(total)}"
    return f"{line}; not steps: {', '.join(parts)}" if parts else line


def introduce(
    run: Run, local: Batch | Pairs, writer: MetricWriter, progress: Progress
) -> MetricsCallback:
    """Log what is about to run.

    Args:
        run: built.
        local: this process's rows of its first batch, by which a mean step's FLOPs are judged.
        writer: of the run's metrics.
        progress: lines for people.

    Returns:
        What logs the run's steps.
    """
    peak = PeakRate(run.meshes, run.config.network.dtype)
    flops = _log_model(run, local, peak.source, progress.log)
    given = writer, progress, run.training.learning_rate, flops, peak
    mixture = _mixture(run)
    return MetricsCallback(*given, *([mixture.counts_before] if mixture else []))


def _mixture(run: Run) -> MixtureOrder | None:
    """The order of a run's data if they are a mixture."""
    is_one = not isinstance(run.dataset, PairDataset) and run.config.data.mixture
    return run.dataset.order if is_one else None


def _log_model(
    run: Run, local: Batch | Pairs, peak: str, log: Callable[[str], None]
) -> model_flops.Flops:
    """Log the model, its mesh and its data; ``peak`` says where MFU's denominator is from."""
    rows = run.config.data.batch_size
    scale = rows / len(run.rows)
    flops = run.training.flops_per_step(local, scale)
    size = sum(int(np.prod(x.shape)) for x in run.model.shapes.values())
    trained = sum(int(np.prod(run.model.shapes[path].shape)) for path in run.training.leaves)
    meshes = ", vision encoder on ".join(map(mesh_text, run.meshes))
    log(f"{size:,} parameters, {trained:,} trained; mesh {meshes}")
    cost = f"{flops.total / 1e9:.2f} GFLOP a step; MFU against {peak}"
    if isinstance(local, Pairs):
        for line in embedding_run.introduction(run, local):
            log(line)
        log(cost)
        log_unknown(run, log)
        _log_problems(run, log)
        return flops
    tokens = float((np.asarray(local.segment) > 0).sum()) * scale
    log(
        f"{len(run.dataset.records):,} records, {len(run.dataset.corpus.paths):,} images; "
        f"{run.steps} steps of {rows} sequences x {local.tokens.shape[1]} tokens, "
        f"{100 * tokens / (rows * local.tokens.shape[1]):.0f} % filled; {cost}"
    )
    mixture = _mixture(run)
    for line in mixture.lines(run.steps) if mixture else ():
        log(line)
    log_unknown(run, log)
    _log_problems(run, log)
    return flops


def _log_problems(run: Run, log: Callable[[str], None]) -> None:
    if problems := run.dataset.problems:
        log(f"{len(problems)} records are skipped; the first: {problems[0]}")


def log_unknown(run: Run, log: Callable[[str], None]) -> None:
    """Log how many tokens the tokenizer has no word for, where they are trained on.

    Args:
        run: built.
        log: prints a line.
    """
    data, config = run.dataset, run.config
    if run.tokenizer is None:
        return
    if isinstance(data, PairDataset):
        lost = sum(column.measured.unknown for column in (data.queries, data.documents))
    else:
        lost = data.facts.unknown
    if lost:
        given = config.init_from or config.tokenizer.path or config.network.checkpoint
        advice = "raise config.tokenizer.vocab_size or set config.tokenizer.kind=bpe"
        log(
            f"{lost} trained tokens of different texts are <unk>, words that the tokenizer does "
            f"not have; {'all of them are one word to the model' if given else advice}"
        )


def memory_callback(run: Run, local: Batch | Pairs, log: Callable[[str], None]) -> Callback | None:
    """The callback that compares the planner's estimate with the real step, or ``None``.

    The planner is loaded only where ``config.memory_estimate`` or an ``auto`` setting asks for it.

    Args:
        run: built.
        local: this process's rows of its first batch.
        log: prints a line.
    """
    if not (run.config.memory_estimate or run.auto):
        return None
    from jaxvlm.trainer.callbacks.memory import MemoryCallback

    return MemoryCallback(run, local, log)
