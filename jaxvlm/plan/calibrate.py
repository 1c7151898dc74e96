"""What this machine's devices reach: matmuls, memory and collectives, measured in some seconds.

The rates are kept in a file by kind of device and JAX version, and ``machine.parse`` takes them
where they are of its device. A makers' figure is a bound; these are what a step gets.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError

FORMAT = 1
PRODUCTS = ("forward", "input", "weight")
"""``x w``, ``dy w'`` and ``x' dy``: a matmul with weights and its two gradients."""
SCORES = ("keys", "values", "back")
"""Attention's: ``q k'``, ``p v`` and ``p' dy``, a head at a time."""
_ROWS, _LENGTH = 1024, 256
_Table = dict[str, dict[int, float]]


class Rates(NamedTuple):
    """Of one device."""

    kind: str
    """As :func:`kind_of` says it."""
    jax: str
    """The version that measured it."""
    matmul: dict[str, _Table]
    """dtype -> of :data:`PRODUCTS` -> a square weight's side -> FLOP/s."""
    scores: dict[str, _Table]
    """dtype -> of :data:`SCORES` -> a head's dim -> FLOP/s."""
    memory: dict[int, float]
    """Bytes of an array -> bytes/s, read and written, of one operation after the other."""
    softmax: float
    """Numbers/s."""
    activation: float
    """Numbers/s of a GELU."""
    links: float
    """Bytes/s that a device sends in an all-reduce among all here; 0: there is one device."""

    def product(self, dtype: str, which: str, size: float | int) -> float:
        """FLOP/s of a matmul with weights whose smaller side is ``size``."""
        return _between(self.matmul[dtype][which], size)

    def moved(self, size: float | int) -> float:
        """Bytes/s of work on arrays of so many bytes."""
        return _between(self.memory, size)

    def score(self, dtype: str, which: str, head_dim: float | int) -> float:
        """FLOP/s of attention's product."""
        return _between(self.scores[dtype][which], head_dim)


def measure(
    devices: Sequence[Any] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure; the best of some repeats counts, for what else runs only ever takes time away.

    Args:
        devices: of one kind; all of this process if ``None``.
        dtypes: of matmuls.
        repeats: of each measurement.
        clock: seconds; ``time.process_time`` with one thread is not disturbed by other work.

    Raises:
        ConfigError: a device on which a matmul can't be run.
    """
    import jax

    devices = list(jax.devices() if devices is None else devices)
    run = _Timer(devices[0], repeats, clock)
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    sizes += () if devices[0].platform == "cpu" else (2048, 4096, 8192)
    try:
        return Rates(
            kind_of(devices[0]), jax.__version__,
            {dtype: _products(run, dtype, sizes) for dtype in dtypes},
            {dtype: _scores(run, dtype) for dtype in dtypes},
            _memory(run), *_elementwise(run), _links(devices, repeats, clock),
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"{devices[0].device_kind} can't be measured: {first}") from None


def kind_of(device: Any) -> str:
    """What rates are kept under: JAX's kind, and of a CPU which one and how many cores."""
    if device.platform != "cpu":
        return str(device.device_kind)
    return f"cpu {_processor()} x {_cores()}"


def cpu_kind() -> str:
    """Likewise, of this machine's CPU, without JAX."""
    return f"cpu {_processor()} x {_cores()}"


def _cores() -> int:
    """Those that this process may use; macOS does not say, so there all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_path() -> pathlib.Path:
    """The user's file."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "jaxvlm" / "calibration.json"


def save(rates: Rates, path: str | os.PathLike[str] = "") -> pathlib.Path:
    """Keep them, beside those of other kinds and versions.

    Args:
        rates: measured.
        path: file; "": the user's.

    Raises:
        ConfigError: the file can't be written, or is another's.
    """
    where = pathlib.Path(path) if path else default_path()
    rows = [row for row in _read(where) if (row["kind"], row["jax"]) != (rates.kind, rates.jax)]
    text = json.dumps({"format": FORMAT, "rates": [*rows, rates._asdict()]}, indent=1)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        part = where.with_name(f"{where.name}.{os.getpid()}")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(where)
    except OSError as error:
        raise ConfigError(f"{where}: rates can't be kept there: {error.strerror}") from None
    return where


def load(
    kinds: Callable[[str], bool], version: str, path: str | os.PathLike[str] = ""
) -> Rates | None:
    """Rates that were kept, the newest if there are some.

    Args:
        kinds: whether a kind is the one that is wanted.
        version: JAX's.
        path: file; "": the user's.

    Raises:
        ConfigError: the file is no such file.
    """
    rows = _read(pathlib.Path(path) if path else default_path())
    found = [row for row in rows if row["jax"] == version and kinds(row["kind"])]
    if not found:
        return None
    row = dict(found[-1])
    for table in ("matmul", "scores"):
        row[table] = {
            dtype: {name: _numbered(of) for name, of in both.items()}
            for dtype, both in row[table].items()
        }
    row["memory"] = _numbered(row["memory"])
    return Rates(**row)


def _numbered(table: Mapping[str, float]) -> dict[int, float]:
    return {int(size): rate for size, rate in table.items()}


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    advice = f"{path}: not a file of measured rates; remove it and measure again"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    try:
        made = json.loads(text)
        rows = made["rates"] if made["format"] == FORMAT else []
        if all(set(Rates._fields) == set(row) for row in rows):
            return list(rows)
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(advice)


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def _between(table: Mapping[int, float], size: float | int) -> float:
    """Linear in the logarithm of the size, flat beyond what was measured."""
    known = sorted(table)
    if size <= known[0] or size >= known[-1]:
        return table[known[0] if size <= known[0] else known[-1]]
    high = next(n for n in known if n >= size)
    low = known[known.index(high) - 1]
    share = math.log(size / low) / math.log(high / low)
    return table[low] ** (1 - share) * table[high] ** share


class _Timer:
    """Seconds of a jitted function on a device."""

    def __init__(self, device: Any, repeats: int, clock: Callable[[], float]):
        self.device, self.repeats, self.clock = device, repeats, clock

    def arrays(self, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
        """Of random numbers."""
        import jax
        import numpy as np

        rng = np.random.default_rng(0)
        made = [rng.standard_normal(shape, np.float32) for shape in shapes]
        return [jax.device_put(jax.numpy.asarray(x, dtype), self.device) for x in made]

    def __call__(self, work: Callable[..., Any], *args: Any, least: float | int = 0.02) -> float:
        """Of one call: the least of some repeats of as many calls as take ``least`` seconds."""
        import jax

        run = jax.jit(work)
        jax.block_until_ready(run(*args))
        calls, best = 1, float("inf")
        for _ in range(self.repeats + 1):
            start = self.clock()
            for _ in range(calls):
                out = run(*args)
            jax.block_until_ready(out)
            spent = max(self.clock() - start, 1e-9) / calls
            calls = max(1, min(1000, round(least / spent)))
            best = min(best, spent)
        return best


def _products(run: _Timer, dtype: str, sizes: Sequence[int]) -> _Table:
    table: _Table = {name: {} for name in PRODUCTS}
    for size in sizes:
        x, w, dy = run.arrays(dtype, (_ROWS, size), (size, size), (_ROWS, size))
        flops = 2 * _ROWS * size * size
        table["forward"][size] = flops / run(lambda x, w: x @ w, x, w)
        table["input"][size] = flops / run(lambda dy, w: dy @ w.T, dy, w)
        table["weight"][size] = flops / run(lambda x, dy: x.T @ dy, x, dy)
    return table


def _scores(run: _Timer, dtype: str) -> _Table:
    table: _Table = {name: {} for name in SCORES}
    batch = (8, _LENGTH)
    for size in (32, 64, 128):
        q, k, p = run.arrays(dtype, (*batch, size), (*batch, size), (*batch, _LENGTH))
        flops = 2 * batch[0] * _LENGTH * _LENGTH * size
        table["keys"][size] = flops / run(lambda q, k: q @ k.swapaxes(1, 2), q, k)
        table["values"][size] = flops / run(lambda p, k: p @ k, p, k)
        table["back"][size] = flops / run(lambda p, k: p.swapaxes(1, 2) @ k, p, k)
    return table


def _memory(run: _Timer) -> dict[int, float]:
    """Sums of two arrays, one after the other within a program: no page is new to the process."""
    import jax

    def turn(_: Any, both: Any) -> Any:
        return both[1], both[0] + both[1]

    table = {}
    for size in (2**16, 2**18, 2**20, 2**22) if run.device.platform == "cpu" else (2**22, 2**26):
        x, y = run.arrays("float32", (size,), (size,))
        turns = max(8, 2**22 // size)

        def work(x: Any, y: Any, turns: int = turns) -> Any:
            return jax.lax.fori_loop(0, turns, turn, (x, y))

        table[4 * size] = turns * 12 * size / run(work, x, y)
    return table


def _elementwise(run: _Timer) -> tuple[float, float]:
    import jax

    (x,) = run.arrays("float32", (64, 256, 256))
    softmax = x.size / run(lambda x: jax.nn.softmax(x, axis=-1), x)
    return softmax, x.size / run(lambda x: jax.nn.gelu(x, approximate=False), x)


def _links(devices: Sequence[Any], repeats: int, clock: Callable[[], float]) -> float:
    """By the ring algorithm: an all-reduce sends 2 (n - 1) / n of what is summed up."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    n = len(devices)
    if n == 1:
        return 0.0
    mesh = jax.sharding.Mesh(np.asarray(devices), ("all",))
    size = 2**20 if devices[0].platform == "cpu" else 2**25
    split = NamedSharding(mesh, PartitionSpec("all"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.ones((n, size), np.float32), split)
    total = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    jax.block_until_ready(total(x))
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(total(x))
        best = min(best, clock() - start)
    return 2 * (n - 1) / n * 4 * size / max(best, 1e-9)
