"""The table of a sweep: a line for each group of trials that differ in their seed alone."""

from __future__ import annotations

import csv
import io
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxvlm.checkpoint.run_record import write_whole
from jaxvlm.config import ConfigError, json_text
from jaxvlm.sweep import sweep
from jaxvlm.sweep.definition import SEED, as_text

CSV, PLOT = "table.csv", "sweep.png"
_DRAWN = 40  # groups


class Group(NamedTuple):
    """Trials that differ in their seed alone, and their metric."""

    factor: str
    settings: dict[str, str]
    """Path -> text of what the group's trials change, but for the seed."""
    scores: dict[str, float]
    """Id of a trial that is done -> its metric."""
    trials: list[str]
    """Ids of all its trials."""

    @property
    def mean(self) -> float | None:
        """Mean of the metric; ``None`` where no trial is done."""
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the metric (n - 1); ``None`` of fewer than two trials."""
        values = list(self.scores.values())
        if len(values) < 2:
            return None
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def name(self) -> str:
        """The factor and the settings in one line."""
        settings = [] if self.factor else [f"{path}={text}" for path, text in self.settings.items()]
        return ", ".join([*([self.factor] if self.factor else []), *settings]) or "the recipe"


class Table(NamedTuple):
    """The groups of a sweep, the best first."""

    metric: str
    mode: str
    """max | min."""
    groups: list[Group]
    others: list[dict[str, Any]]
    """Trials that are not done, as in :func:`jaxvlm.sweep.sweep.read_status`."""
    not_asked: list[dict[str, Any]]
    """Trials in the folder that the sweep does not ask for any more."""


def make_table(workdir: pathlib.Path, metric: str = "", mode: str = "") -> Table:
    """Make the table of a sweep, of the last value of a metric that each trial logged.

    Args:
        workdir: folder of the sweep.
        metric: name in ``metrics.jsonl``, ``eval/`` left out or not; "": the sweep's own.
        mode: max | min; "": the sweep's own.

    Raises:
        ConfigError: there is no sweep, or no trial that is done has logged the metric.
    """
    definition = sweep.read_definition(workdir)
    metric, mode = metric or definition.metric, mode or definition.mode
    status = sweep.read_status(workdir)
    groups: dict[str, Group] = {}
    known: set[str] = set()
    for row in status["trials"]:
        settings = {path: as_text(x) for path, x in row["values"].items() if path != SEED}
        new = Group(row["factor"], settings, {}, [])
        group = groups.setdefault(json.dumps([row["factor"], settings], sort_keys=True), new)
        group.trials.append(row["id"])
        if row["state"] == "done":
            logged = last_values(workdir / row["id"])
            known |= logged.keys()
            value = logged.get(f"eval/{metric}", logged.get(metric))
            if value is not None:
                group.scores[row["id"]] = value
    found = list(groups.values())
    if known and not any(group.scores for group in found):
        names = sorted(name.removeprefix("eval/") for name in known if name.startswith("eval/"))
        raise ConfigError(
            f"no trial of {workdir} has logged the metric {metric!r}; --metric can be "
            f"{', '.join([*names, *(name for name in ('train/loss',) if name in known)])}"
        )
    sign = -1 if mode == "max" else 1
    found.sort(key=lambda g: sign * g.mean if g.mean is not None and g.mean == g.mean else math.inf)
    others = [row for row in status["trials"] if row["state"] != "done"]
    return Table(metric, mode, found, others, status["not_asked"])


def last_values(folder: pathlib.Path) -> dict[str, float]:
    """The last value of each metric that a run logged; one that a kill cut off is passed over."""
    path, found = folder / "metrics.jsonl", dict[str, float]()
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else []:
        try:
            for name, value in dict(json_text.parse(line)).items():
                found[name] = float(value)  # of "nan" too
        except (TypeError, ValueError):
            continue
    return found


def as_json(table: Table) -> dict[str, Any]:
    """The table as JSON values."""
    groups = [
        {
            "factor": group.factor,
            "settings": group.settings,
            "mean": group.mean,
            "std": group.std,
            "n": len(group.scores),
            "trials": group.trials,
            "scores": group.scores,
        }
        for group in table.groups
    ]
    return {**table._asdict(), "groups": groups}


def as_text_lines(table: Table) -> str:
    """The table as lines for people."""
    best = "highest" if table.mode == "max" else "lowest"
    lines = [f"the {best} {table.metric} first; std over seeds, n - 1"]
    paths = _paths(group.settings for group in table.groups if not group.factor)
    has_factor = any(group.factor for group in table.groups)
    if has_factor:  # what a factor sets is its definition; what a grid crosses it with is not
        every = [set(group.settings) for group in table.groups]
        paths = sorted(set.intersection(*every))
    rows = [[*(["factor"] if has_factor else []), *paths, table.metric, "std", "n"]]
    for group in table.groups:
        rows.append([
            *([group.factor] if has_factor else []),
            *(group.settings.get(path, "") for path in paths),
            _number(group.mean), _number(group.std),
            f"{len(group.scores)}/{len(group.trials)}",
        ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    for title, trials in (("not done:", table.others), (sweep.NOT_ASKED, table.not_asked)):
        lines += [title, *map(sweep.line_of, trials)] if trials else []
    return "\n".join(lines)


def write_csv(table: Table, path: pathlib.Path) -> None:
    """Write the table with all settings, a line for each group."""
    paths = _paths(group.settings for group in table.groups)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["factor", *paths, table.metric, "std", "n", "trials"])
    for group in table.groups:
        numbers = ["" if x is None else repr(x) for x in (group.mean, group.std)]
        settings = [group.settings.get(path, "") for path in paths]
        writer.writerow(
            [group.factor, *settings, *numbers, len(group.scores), " ".join(group.trials)]
        )
    write_whole(path, out.getvalue())


def write_plot(table: Table, path: pathlib.Path) -> str:
    """Draw each group's trials, mean and standard deviation, the best on top.

    Returns:
        Why nothing was drawn; "" where it was.
    """
    drawn = [g for g in table.groups if g.mean is not None and math.isfinite(g.mean)][:_DRAWN]
    if not drawn:
        return f"no {path.name}: no trial is done yet"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"no {path.name}: it needs matplotlib: pip install 'jaxvlm[sweep]'"
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for row, group in enumerate(drawn):
        values = list(group.scores.values())
        axes.plot(values, [row] * len(values), ".", color="tab:gray", alpha=0.7)
        axes.errorbar(
            group.mean or 0.0, row, xerr=group.std or 0.0, fmt="o", color="tab:blue", capsize=3
        )
    axes.set_yticks(range(len(drawn)), [group.name[:80] for group in drawn])
    axes.invert_yaxis()
    axes.set_xlabel(f"{table.metric}: trials, mean and standard deviation")
    axes.grid(axis="x", alpha=0.3)
    with io.BytesIO() as image:
        figure.savefig(image, format=path.suffix[1:], dpi=150)
        write_whole(path, image.getvalue())
    return ""


def _paths(settings: Iterable[dict[str, str]]) -> Sequence[str]:
    """Paths in the order in which they come."""
    return list(dict.fromkeys(path for group in settings for path in group))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
