"""Hands bad inputs to the project's own entry points, in processes with limits, and counts."""

from __future__ import annotations

import collections
import json
import multiprocessing
import pathlib
import resource
import tempfile
import time
import traceback
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.bad_input import data_files, folders
from tests.bad_input import settings as of_settings

SECONDS, MEMORY = 10.0, 2 * 2**30
"""Limits of one input: its time, and the memory beyond what the process holds without it."""
KINDS: dict[str, tuple[Any, int]] = {
    "conversations": (data_files.conversations, 4),
    "pairs": (data_files.pairs, 3),
    "tables": (data_files.tables, 3),
    "tar": (data_files.tars, 3),
    "image": (data_files.images, 3),
    "config": (folders.configs, 5),
    "tokenizer": (folders.tokenizers, 2),
    "template": (folders.templates, 2),
    "processor": (folders.processors, 2),
    "weights": (folders.weights, 2),
    "override": (of_settings.overrides, 3),
}
"""Kind -> its generator, and its share of the inputs."""


class Outcome(NamedTuple):
    """What an input led to."""

    kind: str
    what: str
    """ok | refused | traceback | hang | memory."""
    where: str = ""
    """file:line that raised, and the error, or the line that refused."""
    input: str = ""
    """The beginning of the input, of those that went wrong."""


def inputs(kind: str, count: int, number: int = 0) -> list[tuple[str, bytes]]:
    """Draw ``count`` inputs of a kind, the same ones each time."""
    drawn: list[tuple[str, bytes]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind][0]())
    def draw(one: tuple[str, bytes]) -> None:
        drawn.append(one)

    draw()
    return drawn[:count]


def outcomes(count: int, number: int = 0, workers: int = 2) -> list[Outcome]:
    """Hand about ``count`` inputs of all kinds in, each kind in a process of its own."""
    shares = sum(share for _, share in KINDS.values())
    found: list[Outcome] = []
    waiting = [
        (kind, inputs(kind, -(-count * share // shares), number))
        for kind, (_, share) in KINDS.items()
    ]
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Worker(*waiting.pop(0)))
            for worker in list(running):
                if worker.is_done():
                    running.remove(worker)
                    found += worker.found
            time.sleep(0.02)
    finally:
        for worker in running:
            worker.stop()
    return found


class _Worker:
    """Runs the inputs of one kind; starts again behind one that ended or blocked its process."""

    def __init__(self, kind: str, given_: list[tuple[str, bytes]]):
        self.kind, self.given, self.found = kind, given_, list[Outcome]()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        rest = self.given[len(self.found) :]
        self.process = context.Process(target=_serve, args=(theirs, self.kind, rest), daemon=True)
        self.process.start()
        theirs.close()
        self.since, self.limit = time.monotonic(), 120.0  # imports come first

    def is_done(self) -> bool:
        """Take what the process has sent; whether every input has an outcome."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                self.since, self.limit = time.monotonic(), SECONDS
                if message is not None:
                    self.found.append(message)
        except EOFError:
            if len(self.found) < len(self.given):
                self._give_up("memory", f"the process ended ({self.process.exitcode})")
        if time.monotonic() - self.since > self.limit and len(self.found) < len(self.given):
            self._give_up("hang", f"over {self.limit:.0f} s")
        if len(self.found) < len(self.given):
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()

    def _give_up(self, what: str, where: str) -> None:
        self.stop()
        bad = self.given[len(self.found)]
        self.found.append(Outcome(self.kind, what, where, repr(bad)[:300]))
        if len(self.found) < len(self.given):
            self._start()


def _serve(pipe: Any, kind: str, given_: list[tuple[str, bytes]]) -> None:
    from tests.bad_input import entry_points

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        enter = entry_points.prepare(kind, folder)
        held = _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
        pipe.send(None)  # ready: from here on, an input has its 10 seconds
        for file, data in given_:
            pipe.send(one(kind, file, data, enter))


def _address_space() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def one(kind: str, file: str, data: bytes, enter: Any) -> Outcome:
    """Hand one input in, and say what came of it."""
    from tests.bad_input import entry_points

    try:
        said = enter(file, data)
    except entry_points.REFUSALS as error:
        text = str(error)
        try:
            text.encode("utf-8", "backslashreplace")
        except UnicodeError:
            return Outcome(kind, "traceback", "an unprintable line", repr((file, data))[:300])
        return Outcome(kind, "refused", text[:120])
    except MemoryError as error:
        return Outcome(kind, "memory", _place(error), repr((file, data))[:300])
    except Exception as error:
        return Outcome(kind, "traceback", _place(error), repr((file, data))[:300])
    return Outcome(kind, "refused" if said else "ok", str(said)[:120])


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
    bad = [o for o in found if o.what not in ("ok", "refused")]
    places = collections.Counter(f"{o.kind}: {o.what}: {o.where}" for o in bad)
    total = collections.Counter(o.what for o in found)
    return {"inputs": len(found), "total": dict(total), "kinds": kinds, "places": dict(places)}


def write(path: str, found: list[Outcome]) -> None:
    """Write the summary, and the inputs that went wrong."""
    bad = [o._asdict() for o in found if o.what not in ("ok", "refused")]
    pathlib.Path(path).write_text(json.dumps({**summary(found), "bad": bad}, indent=2) + "\n")
