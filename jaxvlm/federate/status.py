"""What a coordinator's folder tells of its federation: versions, sites, lags, losses, bytes."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxvlm.config import ConfigError, json_text

_COLUMNS = ("site", "version", "accepted", "late", "bad", "duplicates", "lag", "loss", "tokens")


def read_log(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Records of ``coordinator.jsonl``, oldest first; a line cut off by a kill is left out."""
    path = folder / "coordinator.jsonl"
    records = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json_text.parse(line))
        except ValueError:
            continue
    return records


def read_status(folder: str | pathlib.Path) -> dict[str, Any]:
    """Read the state of a federation.

    Args:
        folder: the coordinator's; of a simulation, its workdir too.

    Returns:
        JSON values: ``version``, ``rounds``, ``waiting`` (sites whose updates wait), ``sites`` (a
        row each), ``versions`` (a row for each outer update).

    Raises:
        ConfigError: there is no federation, or a file is damaged.
    """
    root = pathlib.Path(folder)
    root = root / "coordinator" if (root / "coordinator").is_dir() else root
    try:
        federation = json_text.read(root / "federation.json")
        table = json_text.read(root / "table.json")
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no federation that has begun: give the --workdir of `jaxvlm federate "
            "serve` or `simulate`"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{root}: a file is damaged: {error}") from None
    sites = []
    for name, record in sorted(table["sites"].items()):
        sent, received = table["bytes"].get(name, [0, 0])
        row = {"site": name, "version": record.pop("held"), **record}
        sites.append(row | {"bytes_sent": sent, "bytes_received": received})
    # A version may be in the log twice, where the coordinator was killed right after it.
    versions = {r["version"]: r for r in read_log(root) if r["event"] == "version"}
    return {
        "version": table["version"],
        "rounds": federation["settings"]["federate"]["rounds"],
        "waiting": [site for site, _, _ in table["buffer"]],
        "sites": sites,
        "versions": [versions[v] for v in sorted(versions)],
    }


PLOTS = (".png", ".svg", ".pdf")
"""Endings of files that are drawn."""


def as_text(status: dict[str, Any]) -> str:
    """The state of a federation as lines for people."""
    lines = [f"version {status['version']} of {status['rounds']}"]
    if status["waiting"]:
        lines[0] += f"; updates wait of {', '.join(status['waiting'])}"
    rows = [_COLUMNS, *[tuple(_shown(site[c]) for c in _COLUMNS) for site in status["sites"]]]
    rows = [(*row, *extra) for row, extra in zip(rows, _megabytes(status))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(x.rjust(w) for x, w in zip(row, widths)) for row in rows]
    for record in status["versions"][-10:]:
        line = f"version {record['version']}: loss {record['loss']:.4f}, lags {record['lags']}"
        if "epsilon" in record:
            line += f", epsilon {record['epsilon']:.3g}"
        if record["left_out"]:
            line += f", left out {', '.join(record['left_out'])}"
        lines.append(line)
    return "\n".join(lines)


def plot(status: dict[str, Any], path: str | pathlib.Path) -> None:
    """Draw loss, lag and bytes by version.

    Raises:
        ConfigError: matplotlib is missing, the file can't be drawn, or no version was made yet.
    """
    path, versions = pathlib.Path(path), status["versions"]
    if not versions:
        raise ConfigError("no version was made yet: there is nothing to draw")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    if path.suffix.lower() not in PLOTS:
        raise ConfigError(f"--plot={path}: give a file that ends with {', '.join(PLOTS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot={path}: there is no folder {path.absolute().parent}")
    x = [r["version"] for r in versions]
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    axes[0].plot(x, [r["loss"] for r in versions], marker=".")
    axes[0].set_ylabel("loss of the updates")
    axes[1].plot(x, [max(r["lags"]) for r in versions], drawstyle="steps-mid", label="largest")
    axes[1].plot(x, [sum(r["lags"]) / len(r["lags"]) for r in versions], label="mean")
    axes[1].set_ylabel("lag in versions")
    axes[1].legend()
    for site in sorted(versions[-1]["bytes"]):
        sizes = [sum(r["bytes"].get(site, [0, 0])) / 1e6 for r in versions]
        axes[2].plot(x, sizes, label=site)
    axes[2].set_ylabel("MB, until the version was made")
    axes[2].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[2].set_xlabel("version")
    axes[2].legend()
    figure.savefig(path)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _megabytes(status: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("MB sent", "MB received")]
    for site in status["sites"]:
        rows.append((f"{site['bytes_sent'] / 1e6:.2f}", f"{site['bytes_received'] / 1e6:.2f}"))
    return rows
