"""Kills runs at drawn moments, resumes them, and compares them with a run that was not killed."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from jaxvlm.checkpoint import restore, run_record
from tests import runs
from tests.kills import recipe

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = (*recipe.KINDS, recipe.PAIRS)
CHAINS = (
    ("start", "start", "writing", "commit", "any"),
    ("start", "writing", "commit", "training", "any"),
)
"""Kills of one run after another, before it may go on to its end: ten of each kind of run.

Process start to ``config.json``; while a checkpoint is written; once one is committed, when others
are deleted; from ``config.json`` to the end; process start to the end.
"""
BEFORE, NO_STEP, WRITING, COMMIT, TRAINING = STANDS = (
    "before config.json",
    "before a process's first step",
    "while a checkpoint was written",
    "within 20 ms of a commit",
    "between checkpoints",
)
_TIMES = (
    "time",
    "seconds",
    "_ms",
    "tokens_per_s",
    "images_per_s",
    "pairs_per_s",
    "mfu",
    "wait_",
    "goodput",
    "slowest_process",
)
"""What the names of metrics contain that are not the same from run to run."""


class Moment(NamedTuple):
    """When to kill: ``share`` of the way through a phase that :data:`CHAINS` names."""

    phase: str
    share: float


class Kill(NamedTuple):
    """A kill that took place."""

    kind: str
    phase: str
    """That was drawn."""
    seconds: float
    """After the process had started."""
    stands: str
    """One of :data:`STANDS`: what the run's folder shows."""
    step: int
    """The last one in metrics.jsonl; 0: none."""


class Unbroken(NamedTuple):
    """A run that nobody killed, and how long it took."""

    workdir: pathlib.Path
    config_after: float
    """Seconds from the process's start until ``config.json`` stood."""
    seconds: float
    """Seconds from the process's start to its end."""


def moments(kind: str, seed: int) -> list[list[Moment]]:
    """Draw the moments of all chains of a kind of run."""
    draw = random.Random(f"{seed} {kind}")
    return [[Moment(phase, draw.random()) for phase in chain] for chain in CHAINS]


def prepare(folder: pathlib.Path) -> pathlib.Path:
    """Write the data of all kinds of runs to a folder, and return it."""
    folder.mkdir(parents=True)
    runs.write_data(folder)
    runs.write_captions(folder)
    return folder


class Process:
    """A training run's process, in a process group of its own; as a context, killed at its end.

    Args:
        kind: of :data:`KINDS`.
        data: what :func:`prepare` returned.
        workdir: the run's folder; a store of visual tokens and what the process says lie next to
            it.
    """

    def __init__(self, kind: str, data: pathlib.Path, workdir: pathlib.Path):
        self.workdir = workdir
        self.said = workdir.with_suffix(".log")
        config = f"{ROOT}/tests/kills/recipe.py:{kind}:{data}:{workdir.with_suffix('.store')}"
        command = runs.command("train", f"--config={config}", f"--workdir={workdir}")
        env = runs.environment(devices=2, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(runs.compile_cache()))
        workdir.parent.mkdir(parents=True, exist_ok=True)
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=said, stderr=said, start_new_session=True
            )
        self.begin, self.began_at = time.monotonic(), time.time()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def wait(self, until: Callable[[], bool], limit: float = 600.0) -> bool:
        """Wait until something holds; False if the process ended before."""
        while self.process.poll() is None and not until():
            if time.monotonic() - self.begin > limit:
                self.kill()
                raise AssertionError(f"{self.workdir} hangs: {self.said.read_text()[-2000:]}")
            time.sleep(0.0005)
        return self.process.poll() is None

    def finish(self) -> None:
        """Wait for the run's end, which must be a good one."""
        self.wait(lambda: False)
        assert self.process.returncode == 0, self.said.read_text()[-3000:]

    def kill(self) -> None:
        """SIGKILL to the process and to all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def unbroken(kind: str, data: pathlib.Path, workdir: pathlib.Path) -> Unbroken:
    """Train a run to its end."""
    with Process(kind, data, workdir) as process:
        process.wait((workdir / "config.json").is_file)
        config_after = time.monotonic() - process.begin
        process.finish()
        return Unbroken(workdir, config_after, time.monotonic() - process.begin)


def chain(
    kind: str, given: Sequence[Moment], data: pathlib.Path, workdir: pathlib.Path, whole: Unbroken
) -> tuple[list[Kill], list[str]]:
    """Kill a run at each of the moments, let it go on to its end, and compare it.

    A run that ends before its moment is compared, and the moment is tried with a new one.

    Returns:
        The kills, and what differs from ``whole``.
    """
    kills: list[Kill] = []
    left = list(given)
    for number in range(len(given)):
        folder = workdir / str(number)
        while left and (kill := _kill_at(kind, left[0], data, folder, whole)):
            kills.append(kill)
            left.pop(0)
        with Process(kind, data, folder) as process:
            try:
                process.finish()
            except AssertionError as error:
                return kills, [f"does not go on: {error}"]
        found = differences(kind, whole.workdir, folder)
        if found or not left:
            return kills, found
    return kills, []


def _kill_at(
    kind: str, moment: Moment, data: pathlib.Path, workdir: pathlib.Path, whole: Unbroken
) -> Kill | None:
    """Start a run, or resume it, and kill it at a moment; ``None`` if it ended before."""
    with Process(kind, data, workdir) as process:
        is_killed = _wait_for(process, moment, whole)
        now, seconds = time.time(), time.monotonic() - process.begin
    if not is_killed:
        return None
    said = rows(workdir)
    stood = stands(workdir, process.began_at, now)
    return Kill(kind, moment.phase, round(seconds, 3), stood, said[-1]["step"] if said else 0)


def _wait_for(process: Process, moment: Moment, whole: Unbroken) -> bool:
    """Wait for the moment; False if the process ended before it."""
    folder, config = process.workdir / "checkpoints", process.workdir / "config.json"
    before = _committed(folder)
    # Of the way from config.json to the end; a run that resumes has less of it left.
    left = 1 - max(map(int, before), default=0) / recipe.STEPS
    rest = left * (whole.seconds - whole.config_after)

    def passed(seconds: float, since: float) -> Callable[[], bool]:
        return lambda: time.monotonic() - since >= moment.share * seconds

    match moment.phase:
        case "start":
            due = passed(whole.config_after, process.begin)
            return process.wait(lambda: due() or config.is_file())
        case "any":
            return process.wait(passed(whole.config_after + rest, process.begin))
        case "training":
            is_ready = process.wait(config.is_file)
            return is_ready and process.wait(passed(rest, time.monotonic()))
        case "writing":
            is_ready = process.wait(lambda: bool(_partial(folder)))
            return is_ready and process.wait(passed(0.02, time.monotonic()))
        case _:
            is_ready = process.wait(lambda: bool(_committed(folder) - before))
            return is_ready and process.wait(passed(0.02, time.monotonic()))


def _partial(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*tmp*"))


def _committed(folder: pathlib.Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir(folder) if name.isdigit()}
    return set()


def stands(workdir: pathlib.Path, began: float, killed: float) -> str:
    """Say in which phase a run was killed, by what its folder shows.

    Args:
        workdir: the run's folder.
        began: when the process had started.
        killed: when it was killed; both in seconds, as times of files are.
    """
    if not (workdir / "config.json").is_file():
        return BEFORE
    folder = workdir / "checkpoints"
    steps = [(folder / name).stat().st_ctime for name in _committed(folder)]  # of the renaming
    if steps and max(steps) > max(began, killed - 0.02):
        return COMMIT
    if _partial(folder):
        return WRITING
    metrics = workdir / "metrics.jsonl"
    has_stepped = metrics.is_file() and metrics.stat().st_mtime > began
    return TRAINING if has_stepped else NO_STEP


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; the last may be half a line."""
    found = []
    with contextlib.suppress(OSError, json.JSONDecodeError):
        for line in (workdir / "metrics.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    return found


def differences(kind: str, whole: pathlib.Path, broken: pathlib.Path) -> list[str]:
    """What of a run's metrics and of its last checkpoint is not that of another's, bit for bit."""
    # What was on the devices and in a store is made again, or found, after a kill.
    skip = (*_TIMES, "cache/") if kind == "strict cache and store" else _TIMES
    expected, got = ([_compared(row, skip) for row in rows(x)] for x in (whole, broken))
    found = []
    if len(expected) != len(got):
        found.append(f"{len(got)} rows of metrics instead of {len(expected)}")
    for row, other in zip(expected, got):
        names = sorted(n for n in row.keys() | other.keys() if row.get(n) != other.get(n))
        found += [f"step {row['step']}: {n} {row.get(n)} -> {other.get(n)}" for n in names]
    arrays, others = _last_checkpoint(whole), _last_checkpoint(broken)
    if arrays.keys() != others.keys():
        found.append(f"other arrays: {sorted(arrays.keys() ^ others.keys())}")
    both = sorted(arrays.keys() & others.keys())
    return found + [f"{name}: other bits" for name in both if arrays[name] != others[name]]


def _compared(row: dict[str, Any], skip: tuple[str, ...]) -> dict[str, Any]:
    return {name: x for name, x in row.items() if not any(part in name for part in skip)}


def _last_checkpoint(workdir: pathlib.Path) -> dict[str, bytes]:
    """The bits of every array of the newest checkpoint: parameters and the optimizer's state."""
    folder = epath.Path(workdir) / "checkpoints"
    step = max(run_record.committed_steps(folder))
    found = restore.try_read(
        folder / str(step),
        lambda table: {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in table.items()},
    )
    assert not isinstance(found, str), found
    return {f"{step}/{name}": np.asarray(x).tobytes() for name, x in found[0].items()}


def every(
    kind: str, folder: pathlib.Path, seed: int, log: Callable[[str], None] = print
) -> tuple[list[Kill], list[str]]:
    """Draw and make all kills of a kind of run.

    Returns:
        The kills, and what differs, by chain.
    """
    data = prepare(folder / "data")
    whole = unbroken(kind, data, folder / "unbroken")
    kills: list[Kill] = []
    differ: list[str] = []
    for number, given in enumerate(moments(kind, seed)):
        made, found = chain(kind, given, data, folder / str(number), whole)
        kills += made
        differ += [f"chain {number}: {line}" for line in found]
        log(f"{kind}, {number}: {[kill.stands for kill in made]} {found[:3] or 'same bits'}")
    return kills, differ


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """Counts of kills by what stood, of all and by kind of run."""
    by_kind: dict[str, dict[str, int]] = {}
    for kill in kills:
        counts = by_kind.setdefault(kill.kind, dict.fromkeys(STANDS, 0))
        counts[kill.stands] += 1
    total = collections.Counter(kill.stands for kill in kills)
    return {"kills": len(kills), "total": dict(total), "kinds": by_kind}
