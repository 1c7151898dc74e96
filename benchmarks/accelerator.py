"""One GPU or TPU machine, one script: kernels, jobs, memory, torch peers and strategies.

On a machine with a network, once (Python 3.12; --no-deps, so that JAX stays the machine's own):

    pip install --no-deps --only-binary=:all: --python-version=3.12 --target=wheels \\
        -r benchmarks/accelerator_wheels.txt

(and --platform=manylinux_2_28_x86_64, or the like, if that machine is of another kind). On the
accelerator's machine, in a copy of this repository, without a network:

    PYTHONPATH=wheels:. python benchmarks/accelerator.py --output=OUT

``--list`` names the parts, ``--parts=a,b`` runs those whose names begin so, ``--tiny`` runs all of
them at toy sizes on any machine, in three CPU minutes. Each part prints a JSON line as it ends and
appends it to ``OUT/accelerator.jsonl``: ``part``, ``seconds``, and figures, or ``why`` there are
none (or not all). The first parts tell most, in case ``--deadline`` (600 seconds) ends the run; a
JAX_COMPILATION_CACHE_DIR that is kept spares the next one most of the compiling;
on several chips, ``--parts=environment,strategies`` begins with one part per strategy.

A part is a process of its own; cases of one ``process`` below share it, and if it dies, what is
left of them gets a new one. This file imports only the standard library, and parts are told by
what they lack. FLOPs, and so MFU: see ``jaxvlm.models.model_flops``; peak rates:
``jaxvlm.train.chips``. Weights are random; only the shapes are those of published models.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = "RESULT "
"""Before the JSON of a figure that a part's process prints."""
LEAST = 5.0
"""Seconds that must be left for a part to begin."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part: where its function is, and what it is called with."""

    name: str
    function: str
    """``module.function`` of ``benchmarks.accelerator_parts``: a generator of dicts of figures."""
    arguments: dict[str, Any]
    seconds: float = 120.0
    """Limit, with the start of its process."""
    process: str = ""
    """Parts with the same value share a process; "": a process of its own."""


def _train(name: str, model: str, seconds: float = 120.0, **arguments: Any) -> Part:
    return Part(name, "jobs.train", {"model": model, **arguments}, seconds)


def _parity() -> Iterator[Part]:
    cases = [
        "packed", "causal", "shared images", "rows of 577", "packed patches h64", "soft cap",
        "window", "groups", "rows of 729 h72", "packed patches h80", "rows of 1025", "float32",
    ]  # fmt: skip
    whole = ["causal", "rows of 577", "rows of 729 h72"]
    for kernel, names in (("flash", cases), ("cudnn", whole)):
        for case in names:
            yield Part(
                f"parity/{kernel}/{case}", "parity.attention", {"kernel": kernel, "case": case},
                60, "parity",
            )  # fmt: skip


def _experts() -> Iterator[Part]:
    for way, dtype in (("kernel", "bfloat16"), ("xla", "bfloat16"), ("kernel", "float32")):
        yield Part(f"experts/{way}/{dtype}", "experts.matmul", {"way": way, "dtype": dtype}, 60)


_QWEN, _CLIP = "qwen3-vl-2b", "clip-vit-b-32"
STRATEGIES = ("fsdp", "ddp", "zero1", "hybrid_shard", "fsdp x tensor", "pipeline")
PARTS = (
    Part("environment", "setup.environment", {}, 60),
    _train("qwen3-vl-2b/packed/dots", _QWEN, remat="dots"),
    _train("clip-vit-b-32", _CLIP, remat="dots"),
    Part("torch/clip-vit-b-32", "peers.train", {"model": _CLIP}),
    _train("paligemma2-3b/dots", "paligemma2-3b", remat="dots"),
    Part("torch/paligemma2-3b", "peers.train", {"model": "paligemma2-3b"}),
    Part("decode/batch 16", "decoding.generate", {"batch": 16}, 90),
    _train("smolvlm-256m/frozen encoder/cache off", "smolvlm-256m", cache="off"),
    _train("smolvlm-256m/frozen encoder/cache warm", "smolvlm-256m", cache="warm"),
    _train("qwen3-vl-2b/shared images/dots", _QWEN, remat="dots", shared=True),
    _train("qwen3-vl-2b/lora/packed/dots", _QWEN, remat="dots", trained="lora"),
    _train("llava-1.5-7b/lora/dots", "llava-1.5-7b", remat="dots", trained="lora"),
    *_experts(),
    _train("clip-vit-b-32/gradcache", _CLIP, remat="dots", mini_batch=True),
    Part("torch/qwen3-vl-2b", "peers.train", {"model": _QWEN}),
    *_parity(),
    *(
        _train(f"strategies/{name}", _QWEN, remat="dots", strategy=name)
        for name in STRATEGIES
    ),
    _train("clip-vit-b-32/none", _CLIP, remat="none"),
    _train("qwen3-vl-2b/packed/full", _QWEN, remat="full"),
    _train("qwen3-vl-2b/packed/none", _QWEN, remat="none"),
    Part("decode/batch 1", "decoding.generate", {"batch": 1}, 90),
)  # fmt: skip


def main() -> None:
    """Run the parts that are asked for, or in a part's process that part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for any machine")
    parser.add_argument("--parts", default="", help="beginnings of names, comma-separated; all")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of the whole run")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_parts(json.loads(args.child), args.tiny)
        return
    wanted = tuple(args.parts.split(",")) if args.parts else ("",)
    parts = [part for part in PARTS if part.name.startswith(wanted)]
    if args.tiny:  # a process takes longer to start than a toy to run
        parts = [dataclasses.replace(x, process=x.process or x.function) for x in parts]
    if args.list or not parts:
        print("\n".join(part.name for part in PARTS))
        sys.exit(0 if args.list else f"no part begins with {args.parts}")
    args.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.deadline
    with (args.output / "accelerator.jsonl").open("a", encoding="utf-8") as file:
        for line in results(parts, args.tiny, until):
            text = json.dumps(line)
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def results(parts: list[Part], tiny: bool, until: float) -> Iterator[dict[str, Any]]:
    """Run parts, and yield the line of each as it ends.

    Args:
        parts: in the order to run them in.
        tiny: whether sizes are toys.
        until: ``time.monotonic()`` of the deadline.
    """
    while parts:
        if until - time.monotonic() < LEAST:
            part = parts.pop(0)
            yield {"part": part.name, "seconds": 0.0, "why": "the deadline came before it"}
            continue
        group = next(list(same) for _, same in itertools.groupby(parts, _process))
        for line in in_process(group, tiny, until):
            parts = parts[1:]  # if the process ends early, the rest of them get another
            yield line


def _process(part: Part) -> str:
    """What is equal for parts of one process."""
    return part.process or part.name


def in_process(group: list[Part], tiny: bool, until: float) -> Iterator[dict[str, Any]]:
    """Run parts in one process, and yield the line of each, up to one at which it dies or is late.

    Args:
        group: of one process.
        tiny: whether sizes are toys.
        until: ``time.monotonic()`` of the deadline.
    """
    begun = time.monotonic()
    child = Child(group, tiny)
    try:
        for part in group:
            if until - begun < LEAST:
                return
            limit = min(part.seconds, until - begun)
            found = child.figures(begun + limit)
            if found is None:
                why = child.why() or f"it took more than {limit:.0f} s"
                found = {**child.last, "why": why}
            seconds, begun = time.monotonic() - begun, time.monotonic()
            yield {"part": part.name, "seconds": round(seconds, 1), **found}
            if child.is_done:
                return
    finally:
        child.close()


class Child:
    """A process that runs parts, and prints figures of them as it has them."""

    def __init__(self, group: list[Part], tiny: bool):
        command = [sys.executable, "-m", "benchmarks.accelerator", *["--tiny"] * tiny]
        command.append(f"--child={json.dumps([part.name for part in group])}")
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        # Relative paths are those of the caller's folder; parts run in the repository's.
        paths = [os.path.abspath(path) for path in (*filter(None, given), ROOT)]
        env = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads would spin on cores that others use
            **os.environ,
        }
        env["PYTHONPATH"] = os.pathsep.join(paths)
        if tiny:  # compiling takes longer than the programs
            env.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        self.last: dict[str, Any] = {}
        """Figures of the part that the process is at."""
        self.is_done = False
        """Whether no more figures will come."""
        # Open as long as this object is: what the process says on stderr is read as it ends.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)

    def figures(self, until: float) -> dict[str, Any] | None:
        """Wait for the next part's figures; ``None``: it has not ended, and never will."""
        self.last = {}
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                self.is_done = True
                return None
            if line.startswith(RESULT):
                said = json.loads(line.removeprefix(RESULT))
                self.last |= said["figures"]
                if said["done"]:
                    return self.last

    def why(self) -> str:
        """How the process ended, and the last line of what it said; "" if it runs."""
        try:
            status = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return ""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"its process ended with {status}: {''.join(lines[-1:])[:300]}"

    def close(self) -> None:
        """End the process, and those that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._errors.close()


def run_parts(names: list[str], tiny: bool) -> None:
    """In a part's process: run parts and print their figures as they come."""
    by_name = {part.name: part for part in PARTS}
    for part in [by_name[name] for name in names]:
        try:
            for figures in _function(part)(tiny=tiny, **part.arguments):
                _say(figures, False)
            _say({}, True)
        except Exception as error:  # of any library: it is the reason why there are no figures
            _say({"why": _reason(error)}, True)


def _function(part: Part) -> Any:
    module, function = part.function.split(".")
    return getattr(importlib.import_module(f"benchmarks.accelerator_parts.{module}"), function)


def _say(figures: dict[str, Any], done: bool) -> None:
    print(RESULT + json.dumps({"figures": figures, "done": done}), flush=True)


def _reason(error: Exception) -> str:
    """A line: a missing package, what the part itself says, or an error and where it was raised."""
    from benchmarks.accelerator_parts import Unavailable

    if isinstance(error, Unavailable):
        return str(error)
    missing = (getattr(error, "name", "") or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing not in ("", "jaxvlm", "benchmarks"):
        return f"needs {missing}: bring its wheel, see the first lines of benchmarks/accelerator.py"
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said} ({pathlib.Path(where.filename).name}:{where.lineno})"


if __name__ == "__main__":
    main()
