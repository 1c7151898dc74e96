"""The command ``jaxvlm cache``, which inspects, verifies and prunes a store of tokens."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags

SUMMARY = "Inspect, verify or prune a store of visual tokens on disk."
USAGE = "stat|verify|prune DIR [--unused_days=N] [--keep_gb=N] [--dry_run]"

_SHOWN = 10  # number of bad files and rows that are listed for an identity
_LEAST = {
    "unused_days": "prune: remove the tokens of vision encoders whose tokens no run has opened "
    "for this many days; 0 removes none for this reason.",
    "keep_gb": "prune: remove the tokens of vision encoders, the least recently used first, "
    "until this many GB are left; the most recently used always stay. 0 sets no limit.",
}
_FLAGS = {
    "dry_run": "prune: report what would be removed, and remove nothing.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``cache``."""
    for name, text in _LEAST.items():
        flags.DEFINE_float(name, 0.0, text, lower_bound=0.0, flag_values=values)
    define_flags(values, _FLAGS, dry_run=False)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Inspect, verify or prune a store; ``verify`` exits 1 where part of it can't be read."""
    from jaxvlm.config import ConfigError

    verbs = {"stat": _stat, "verify": _verify, "prune": _prune}
    if len(args) != 2 or args[0] not in verbs:
        raise ConfigError(f"usage: jaxvlm cache {USAGE}")
    given = [name for name in ("unused_days", "keep_gb", "dry_run") if values[name].present]
    if given and args[0] != "prune":
        raise ConfigError(f"cache {args[0]} takes no --{given[0]}; only cache prune does")
    try:
        return verbs[args[0]](args[1], values)
    except OSError as error:
        if error.strerror is None:
            raise  # its message is complete
        raise ConfigError(f"{error.filename or args[1]}: {error.strerror}") from None


def _stat(folder: str, values: flags.FlagValues) -> dict[str, Any]:
    import time

    from jaxvlm.cache.store import maintenance

    usages = maintenance.stat(folder)
    rows, size = sum(usage.rows for usage in usages), sum(usage.bytes for usage in usages)
    print(f"{folder}: {_count(len(usages), 'identity', 'identities')}, {rows:,} rows, {_gb(size)}")
    for usage in usages:
        ratio = usage.raw_bytes / max(usage.bytes, 1)
        days = (time.time() - usage.used) / 86_400
        print(
            f"\n{usage.name}  {usage.codec}  {usage.rows:,} rows in"
            f" {_count(usage.segments, 'file')}, {_gb(usage.bytes)} for {_gb(usage.raw_bytes)} of"
            f" tokens ({ratio:.2f}x), used {days:.1f} days ago"
        )
        for name, fact in usage.facts.items():
            print(f"    {name}: {fact}")
        _list(usage.bad)
    return {"rows": rows, "bytes": size, "identities": [usage._asdict() for usage in usages]}


def _verify(folder: str, values: flags.FlagValues) -> dict[str, Any]:
    from jaxvlm.cache.store import maintenance

    results = []
    for checked in maintenance.verify(folder):
        results.append(checked)
        state = f"{len(checked.bad):,} bad" if checked.bad else "all good"
        print(f"{checked.name}  {checked.rows:,} rows, {_gb(checked.bytes)}: {state}", flush=True)
        _list(checked.bad)
    bad = [line for checked in results for line in checked.bad]
    if bad:
        print(f"Runs recompute bad rows; jaxvlm cache prune {folder} removes them.")
    return {
        "rows": sum(checked.rows for checked in results),
        "bytes": sum(checked.bytes for checked in results),
        "bad": bad,
        "exit_code": 1 if bad else 0,
    }


def _prune(folder: str, values: flags.FlagValues) -> dict[str, Any]:
    from jaxvlm.cache.store import maintenance

    done = maintenance.prune(folder, values.unused_days, values.keep_gb, values.dry_run)
    removed = [
        _count(len(done.identities), "identity", "identities"),
        _count(done.segments, "file") + " that can't be read",
        f"{done.bad_rows:,} bad and {done.double_rows:,} duplicate rows",
        _count(done.temporary, "temporary file") + " of dead processes",
    ]
    verb = "would be removed" if values.dry_run else "removed"
    print(f"{folder}: {verb}: {', '.join(removed)}: {_gb(done.bytes)}; {_gb(done.left)} left")
    for name in done.identities:
        print(f"    {name}")
    if values.keep_gb and done.left > values.keep_gb * 1e9:
        print("That is above --keep_gb: the most recently used tokens always stay.")
    return done._asdict() | {"dry_run": values.dry_run}


def _list(bad: list[str]) -> None:
    for line in bad[:_SHOWN]:
        print(f"    {line}")
    if len(bad) > _SHOWN:
        print(f"    and {len(bad) - _SHOWN:,} more")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _gb(size: int) -> str:
    """Format bytes with a unit, in powers of ten as ``--keep_gb``."""
    shown, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if shown >= 1000:
            shown, unit = shown / 1000, larger
    return f"{size} B" if unit == "B" else f"{shown:.1f} {unit}"
