"""``jaxvlm cache``."""

from __future__ import annotations

from typing import Any

from absl import flags

SUMMARY = "cache stat|verify|prune DIR: a store of visual tokens on disk."
USAGE = "stat|verify|prune DIR [--unused_days=N] [--keep_gb=N] [--dry_run]"

_SHOWN = 10  # bad files and rows that are listed of an identity


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``cache``."""
    flags.DEFINE_float(
        "unused_days",
        0.0,
        "prune: remove the tokens of towers that no run has read for so many days; 0: of none.",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "keep_gb",
        0.0,
        "prune: remove the tokens of towers, those used least lately first, until so many GB are "
        "left; those used last stay. 0: no limit.",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "dry_run", False, "prune: say what would go, and remove nothing.", flag_values=values
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Look after a store; verify exits 1 where something in it can't be read."""
    from jaxvlm.config import ConfigError

    verbs = {"stat": _stat, "verify": _verify, "prune": _prune}
    if len(args) != 2 or args[0] not in verbs:
        raise ConfigError(f"usage: jaxvlm cache {USAGE}")
    given = [name for name in ("unused_days", "keep_gb", "dry_run") if values[name].present]
    if given and args[0] != "prune":
        raise ConfigError(f"cache {args[0]} takes no --{given[0]}; cache prune does")
    try:
        return verbs[args[0]](args[1], values)
    except OSError as error:
        if error.strerror is None:
            raise  # it says all itself
        raise ConfigError(f"{error.filename or args[1]}: {error.strerror}") from None


def _stat(folder: str, values: flags.FlagValues) -> dict[str, Any]:
    import time

    from jaxvlm.cache import upkeep

    usages = upkeep.stat(folder)
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
    from jaxvlm.cache import upkeep

    found = []
    for checked in upkeep.verify(folder):
        found.append(checked)
        state = f"{len(checked.bad):,} bad" if checked.bad else "all good"
        print(f"{checked.name}  {checked.rows:,} rows, {_gb(checked.bytes)}: {state}", flush=True)
        _list(checked.bad)
    bad = [line for checked in found for line in checked.bad]
    if bad:
        print(f"Rows that are bad are made again by runs; jaxvlm cache prune {folder} tidies up.")
    return {
        "rows": sum(checked.rows for checked in found),
        "bytes": sum(checked.bytes for checked in found),
        "bad": bad,
        "exit_code": 1 if bad else 0,
    }


def _prune(folder: str, values: flags.FlagValues) -> dict[str, Any]:
    from jaxvlm.cache import upkeep

    done = upkeep.prune(folder, values.unused_days, values.keep_gb, values.dry_run)
    went = [
        _count(len(done.identities), "identity", "identities"),
        _count(done.segments, "file") + " that can't be read",
        f"{done.bad_rows:,} bad and {done.double_rows:,} double rows",
        _count(done.temporary, "file") + " of dead writers",
    ]
    verb = "would go" if values.dry_run else "removed"
    print(f"{folder}: {verb}: {', '.join(went)}: {_gb(done.bytes)}; {_gb(done.left)} left")
    for name in done.identities:
        print(f"    {name}")
    if values.keep_gb and done.left > values.keep_gb * 1e9:
        print("That is over --keep_gb: the tokens used last stay.")
    return done._asdict() | {"dry_run": values.dry_run}


def _list(bad: list[str]) -> None:
    for line in bad[:_SHOWN]:
        print(f"    {line}")
    if len(bad) > _SHOWN:
        print(f"    and {len(bad) - _SHOWN:,} more")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _gb(size: int) -> str:
    """Bytes for people, in powers of ten as ``--keep_gb``."""
    shown, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if shown >= 1000:
            shown, unit = shown / 1000, larger
    return f"{size} B" if unit == "B" else f"{shown:.1f} {unit}"
