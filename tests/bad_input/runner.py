"""Hands bad inputs to the project's commands, in processes with limits, and counts.

This module imports nothing of jaxvlm's, so that a process may ask the sources of another commit.
"""

from __future__ import annotations

import collections
import importlib
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests import runs

FINE = ("ok", "refused")
SECONDS, MEMORY = 10.0, 2 * 2**30
"""Limits of one input: its time, and the memory beyond what the process holds without it.

Time is the processor's, or the clock's where a process waits: machines may be busy with other work.
"""
KINDS: dict[str, tuple[str, int]] = {
    "conversations": ("data_files.conversations", 4),
    "pairs": ("data_files.pairs", 3),
    "tables": ("data_files.tables", 3),
    "tar": ("data_files.tars", 3),
    "image": ("data_files.images", 3),
    "config": ("folders.configs", 5),
    "tokenizer": ("folders.tokenizers", 2),
    "template": ("folders.templates", 2),
    "processor": ("folders.processors", 2),
    "weights": ("folders.weights", 2),
    "override": ("settings.overrides", 5),
    "workdir": ("workdirs.damages", 2),
}
"""Kind -> its generator, and its share of the inputs."""


class Asked(NamedTuple):
    """What inputs are handed to."""

    source: str = ""
    """Folder with the sources of jaxvlm; "": those that are imported anyway."""
    names: str = ""
    """File with the settings' names there."""


OURS = Asked()


class Input(NamedTuple):
    """What a user could hand in."""

    kind: str
    file: str
    """Name of the file, where it is one."""
    data: bytes


class Outcome(NamedTuple):
    """What an input led to."""

    kind: str
    what: str
    """ok | refused | traceback | status (not 0 or 2 with a line) | hang | memory."""
    where: str = ""
    """file:line that raised, and the error, or the line that refused."""
    input: str = ""
    """The beginning of the input, of those that went wrong."""


def inputs(kind: str, count: int, number: int = 0) -> list[tuple[str, bytes]]:
    """Draw ``count`` inputs of a kind, the same ones each time."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    module, name = KINDS[kind][0].split(".")
    generator = getattr(importlib.import_module(f"tests.bad_input.{module}"), name)
    importlib.import_module("jaxvlm.data.images.image_files")  # draws by `random`: not while we do
    drawn: list[tuple[str, bytes]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(generator())
    def draw(one: tuple[str, bytes]) -> None:
        drawn.append(one)

    draw()
    return drawn[:count]


def outcomes(
    count: int,
    number: int = 0,
    workers: int = 2,
    asked: Asked = OURS,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Outcome]:
    """Hand about ``count`` inputs in, in processes with limits.

    Args:
        count: of inputs.
        number: other inputs for another one.
        workers: processes at a time.
        asked: what they are handed to.
        kinds: of inputs.
    """
    total = sum(KINDS[kind][1] for kind in kinds)
    given = [
        Input(kind, *one)
        for kind in kinds
        for one in inputs(kind, -(-count * KINDS[kind][1] // total), number)
    ]
    with tempfile.TemporaryDirectory() as name:
        shared = pathlib.Path(name)
        write_shared(shared)
        first = Input("prepare", "workdir" if "workdir" in kinds else "", b"")
        prepared = _until_done([_Worker([first], shared, asked)])
        assert prepared[0].what == "ok", prepared
        shares = [given[first::workers] for first in range(min(workers, len(given)))]
        found = _until_done([_Worker(share, shared, asked) for share in shares])
    return sorted(found, key=lambda outcome: list(kinds).index(outcome.kind))


def _until_done(workers: list[_Worker]) -> list[Outcome]:
    try:
        while sum(not worker.is_done() for worker in workers):
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.stop()
    return [outcome for worker in workers for outcome in worker.found]


def write_shared(shared: pathlib.Path) -> None:
    """Write the good files that inputs stand beside, and that commands read."""
    from tests.bad_input import data_files, folders

    inputs_ = shared / "inputs"
    inputs_.mkdir()
    data_files.write_images(inputs_)
    words = ["a", "cat", "what", "is", "it", "dogs"]  # those of the tokenizer
    good = {
        "conversations": [data_files.CONVERSATION] * 8,
        "pairs": [
            {"query": f"{a} {b}", "positive": f"{b} {a} it"} for a in words[:3] for b in words[3:]
        ],
    }
    for name, records in good.items():
        (inputs_ / f"good_{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    for config in (folders.LLAVA, folders.QWEN, folders.BERT):
        folder = shared / "models" / config["model_type"]
        folder.mkdir(parents=True)
        folders.write_good(folder, config)


class _Worker:
    """A process that takes inputs; another one goes on behind an input that ended or blocked it."""

    def __init__(self, given: list[Input], shared: pathlib.Path, asked: Asked):
        self.given, self.found = given, list[Outcome]()
        self.shared, self.asked = shared, asked
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        rest = self.given[len(self.found) :]
        how = (theirs, rest, self.shared, self.asked)
        self.process = context.Process(target=_serve, args=how, daemon=True)
        self.process.start()
        theirs.close()
        self._begin(600.0)  # imports come first

    def _begin(self, limit: float) -> None:
        self.since, self.limit, self.used = time.monotonic(), limit, self._processor_seconds()

    def _processor_seconds(self) -> float:
        try:
            fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return 0.0
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _is_late(self) -> bool:
        seconds = time.monotonic() - self.since
        used = self._processor_seconds() - self.used
        waits = used < 0.02 * seconds
        return seconds > self.limit and (waits or used > self.limit or seconds > 12 * self.limit)

    def is_done(self) -> bool:
        """Take what the process has sent; whether every input has an outcome."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                self._begin(SECONDS)
                if message is not None:
                    self.found.append(message)
        except EOFError:
            if len(self.found) < len(self.given):
                self.process.join()
                self._give_up("memory", f"the process ended ({self.process.exitcode})")
        if len(self.found) < len(self.given) and self._is_late():
            self._give_up("hang", f"over {self.limit:.0f} s")
        return len(self.found) == len(self.given)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()

    def _give_up(self, what: str, where: str) -> None:
        self.stop()
        bad = self.given[len(self.found)]
        self.found.append(Outcome(bad.kind, what, where, repr(bad[1:])[:300]))
        if len(self.found) < len(self.given):
            self._start()


def _serve(pipe: Any, given: list[Input], shared: pathlib.Path, asked: Asked) -> None:
    from tests.bad_input import commands

    if asked.source:
        sys.path.insert(0, asked.source)
    os.environ |= runs.environment(1)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(runs.compile_cache()))
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}  # a setting may name either
    names = commands.Names(asked.names)
    if given[0].kind == "prepare":
        commands.prepare_shared(shared, names, bool(given[0].file))
        pipe.send(Outcome("prepare", "ok"))
        return
    commands.run(["--version"])
    held = _bytes("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (held + 4 * MEMORY, resource.RLIM_INFINITY))
    enters: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=shared) as name:
        for kind, file, data in given:
            folder = pathlib.Path(name) / kind
            if kind not in enters:
                enters[kind] = commands.prepare(kind, folder, shared, names)
                pipe.send(None)  # ready: from here on, an input has its 10 seconds
            os.chdir(folder)
            pipe.send(one(kind, file, data, enters[kind]))


def _bytes(what: str) -> int:
    """VmSize (addresses), VmRSS (memory) or VmHWM (its peak) of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def one(kind: str, file: str, data: bytes, enter: Any) -> Outcome:
    """Hand one input in, and say what came of it."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    held = _bytes("VmRSS")
    input_ = repr((file, data))[:300]
    try:
        said = enter(file, data)
    except MemoryError as error:
        return Outcome(kind, "memory", _place(error), input_)
    except Exception as error:
        return Outcome(kind, "traceback", _place(error), input_)
    if (most := _bytes("VmHWM") - held) > MEMORY:
        return Outcome(kind, "memory", f"{most / 2**30:.1f} GiB: {said.line[:90]}", input_)
    return Outcome(kind, said.kind, said.line[:200], input_ if said.kind not in FINE else "")


def _place(error: Exception) -> str:
    """The last line of jaxvlm's that an error went through, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/jaxvlm/" in f.filename] or list(frames)
    place = f"{ours[-1].filename.split('/jaxvlm/')[-1]}:{ours[-1].lineno}"
    return f"{place} {type(error).__name__}: {' '.join(str(error).split())[:120]}"


def summary(found: list[Outcome]) -> dict[str, Any]:
    """Counts of each kind, and the distinct places of what went wrong with their counts."""
    kinds: dict[str, dict[str, int]] = {}
    for outcome in found:
        counts = kinds.setdefault(outcome.kind, {})
        counts[outcome.what] = counts.get(outcome.what, 0) + 1
    bad = [o for o in found if o.what not in FINE]
    places = collections.Counter(f"{o.kind}: {o.what}: {o.where}" for o in bad)
    lines = {o.where.split(" ")[0] for o in bad if o.what == "traceback"}
    total = collections.Counter(o.what for o in found)
    return {
        "inputs": len(found),
        "total": dict(total),
        "lines_that_raised": len(lines),
        "kinds": kinds,
        "places": dict(places),
    }


def write(path: str, found: list[Outcome]) -> None:
    """Write the summary, and the inputs that went wrong."""
    bad = [o._asdict() for o in found if o.what not in FINE]
    pathlib.Path(path).write_text(json.dumps({**summary(found), "bad": bad}, indent=2) + "\n")
