"""Measure what this machine's devices reach: matmuls, memory and collectives, in some seconds.

The rates are saved in a file by kind of device and JAX version, and ``machine.parse`` uses them
for machines of that kind. A maker's figure is an upper bound; these are rates that a train step
reaches.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, json_text

FORMAT = 1
PRODUCTS = ("forward", "input", "weight")
"""``x w``, ``dy w'`` and ``x' dy``: a matmul with weights and its two gradients."""
SCORES = ("keys", "values", "back")
"""Attention's matmuls ``q k'``, ``p v`` and ``p' dy``, one head at a time."""
_ROWS, _LENGTH = 1024, 256
_Table = dict[str, dict[int, float]]


class Rates(NamedTuple):
    """Measured rates of one device."""

    kind: str
    """Kind of device, from :func:`kind_of`."""
    jax: str
    """JAX version of the measurement."""
    matmul: dict[str, _Table]
    """dtype -> one of :data:`PRODUCTS` -> side of a square weight matrix -> FLOP/s."""
    scores: dict[str, _Table]
    """dtype -> one of :data:`SCORES` -> head dim -> FLOP/s."""
    memory: dict[int, float]
    """Bytes of an array -> bytes/s, read and written, by consecutive operations."""
    softmax: float
    """Numbers/s."""
    activation: float
    """Numbers/s of a GELU."""
    links: float
    """Bytes/s that a device sends in an all-reduce over all local devices; 0: there is only one."""

    def product(self, dtype: str, which: str, size: float | int) -> float:
        """FLOP/s of a matmul with weights whose smaller side is ``size``."""
        return _between(self.matmul[dtype][which], size)

    def moved(self, size: float | int) -> float:
        """Bytes/s of elementwise work on arrays of ``size`` bytes."""
        return _between(self.memory, size)

    def score(self, dtype: str, which: str, head_dim: float | int) -> float:
        """FLOP/s of one of attention's matmuls."""
        return _between(self.scores[dtype][which], head_dim)


def measure(
    devices: Sequence[Any] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure rates; the best of several repeats counts, since other work only slows a repeat down.

    Args:
        devices: devices of one kind; ``None``: all of this process.
        dtypes: dtypes of the matmuls.
        repeats: number of repeats of each measurement.
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
    """Key under which rates are saved: JAX's device kind; for a CPU its model and core count."""
    if device.platform != "cpu":
        return str(device.device_kind)
    return f"cpu {_processor()} x {_cores()}"


def cpu_kind() -> str:
    """The key of this machine's CPU, determined without JAX."""
    return f"cpu {_processor()} x {_cores()}"


def _cores() -> int:
    """Cores that this process may use; macOS does not report them, so there all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_path() -> pathlib.Path:
    """The user's calibration file."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "jaxvlm" / "calibration.json"


def save(rates: Rates, path: str | os.PathLike[str] = "") -> pathlib.Path:
    """Save rates to a file, next to those of other device kinds and JAX versions.

    Args:
        rates: measured rates.
        path: file; "": the user's.

    Raises:
        ConfigError: the file can't be written, or is not a calibration file.
    """
    file = pathlib.Path(path) if path else default_path()
    rows = [row for row in _read(file) if (row["kind"], row["jax"]) != (rates.kind, rates.jax)]
    text = json.dumps({"format": FORMAT, "rates": [*rows, rates._asdict()]}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"{file}: rates can't be written there: {error.strerror}") from None
    return file


def load(
    kinds: Callable[[str], bool], version: str, path: str | os.PathLike[str] = ""
) -> Rates | None:
    """Load the newest saved rates of a kind of device; ``None`` if there are none.

    Args:
        kinds: predicate of the wanted device kinds.
        version: JAX version.
        path: file; "": the user's.

    Raises:
        ConfigError: the file is not a calibration file.
    """
    rows = _read(pathlib.Path(path) if path else default_path())
    matching = [row for row in rows if row["jax"] == version and kinds(row["kind"])]
    if not matching:
        return None
    row = dict(matching[-1])
    for table in ("matmul", "scores"):
        row[table] = {
            dtype: {name: _numbered(rates_by_size) for name, rates_by_size in tables.items()}
            for dtype, tables in row[table].items()
        }
    row["memory"] = _numbered(row["memory"])
    return Rates(**row)


def _numbered(table: Mapping[str, float]) -> dict[int, float]:
    return {int(size): rate for size, rate in table.items()}


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    advice = f"{path}: not a file of measured rates; remove it and run jaxvlm plan --calibrate"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    try:
        content = json_text.parse(text)
        rows = content["rates"] if content["format"] == FORMAT else []
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
    """Interpolate linearly in the logarithm of the size; constant outside of the measured sizes."""
    sizes = sorted(table)
    if size <= sizes[0] or size >= sizes[-1]:
        return table[sizes[0] if size <= sizes[0] else sizes[-1]]
    high = next(n for n in sizes if n >= size)
    low = sizes[sizes.index(high) - 1]
    share = math.log(size / low) / math.log(high / low)
    return table[low] ** (1 - share) * table[high] ** share


class _Timer:
    """Measure seconds per call of a jitted function on a device."""

    def __init__(self, device: Any, repeats: int, clock: Callable[[], float]):
        self.device, self.repeats, self.clock = device, repeats, clock

    def arrays(self, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
        """Arrays of random numbers."""
        import jax
        import numpy as np

        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
        return [jax.device_put(jax.numpy.asarray(x, dtype), self.device) for x in arrays]

    def __call__(self, work: Callable[..., Any], *args: Any, least: float | int = 0.02) -> float:
        """Seconds of one call: minimum over repeats, each of as many calls as take ``least`` s."""
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
    """Add two arrays repeatedly in one program, so that no memory page is new to the process."""
    import jax

    def turn(_: Any, pair: Any) -> Any:
        return pair[1], pair[0] + pair[1]

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
    """Bytes/s by the ring algorithm: an all-reduce sends 2 (n - 1) / n of the summed array."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    n = len(devices)
    if n == 1:
        return 0.0
    mesh = jax.sharding.Mesh(np.asarray(devices), ("all",))
    size = 2**20 if devices[0].platform == "cpu" else 2**25
    split = NamedSharding(mesh, PartitionSpec("all"))
    replicated = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.ones((n, size), np.float32), split)
    total = jax.jit(lambda x: x.sum(0), out_shardings=replicated)
    jax.block_until_ready(total(x))
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(total(x))
        best = min(best, clock() - start)
    return 2 * (n - 1) / n * 4 * size / max(best, 1e-9)
