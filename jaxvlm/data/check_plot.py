"""A plot of what `jaxvlm data check` counts: tokens, images, sizes, and what is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from jaxvlm.data.errors import DataError
from jaxvlm.data.validate import ValidationReport

_SHORT = 40
"""Characters of a reason that are drawn."""


def draw(reports: Sequence[ValidationReport], path: str) -> None:
    """Draw reports of one or several files to a PNG file, one above the other.

    Args:
        reports: of conversations.
        path: the file, which is replaced.

    Raises:
        DataError: matplotlib is not installed, or the file can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError(
            "--plot needs matplotlib: pip install 'jaxvlm[check]', or leave it out"
        ) from None
    panels = max(len(report.histograms) for report in reports) + 1
    figure = Figure(figsize=(3.6 * panels, 2.8 * len(reports)), layout="constrained")
    rows = figure.subplots(len(reports), panels, squeeze=False)
    for row, report in zip(rows, reports, strict=True):
        for axes, (name, (edges, counts)) in zip(row, report.histograms.items(), strict=False):
            axes.stairs(counts, edges, fill=True)
            axes.set_xlabel(name)
            axes.set_ylabel("records" if "record" in name else "images")
        reasons = {"good": report.good} | {x: len(ids) for x, ids in report.problems.items()}
        names = [name if len(name) <= _SHORT else f"{name[:_SHORT]}…" for name in reasons]
        for axes in row[len(report.histograms) : -1]:
            axes.set_axis_off()
        row[-1].barh(range(len(names)), list(reasons.values()))
        row[-1].set_yticks(range(len(names)), names)
        row[-1].invert_yaxis()
        row[-1].set_xlabel("records")
        row[0].set_title(pathlib.PurePath(report.name).name, loc="left")
    try:
        figure.savefig(path, dpi=100)
    except OSError as error:
        raise DataError(f"--plot={path}: {error.strerror or error}") from None
