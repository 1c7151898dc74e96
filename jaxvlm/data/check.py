"""`jaxvlm data check`: what a run would refuse, by reason, before it starts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data import chat, formats, images, packing, tokenizer
from jaxvlm.data.errors import ImageError, Problem
from jaxvlm.data.patches import Patching
from jaxvlm.data.spans import Spans

_NAMED = 5  # ids listed for each reason
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a data file holds."""

    name: str
    total: int
    """Records, good and bad."""
    good: int
    pictures: int
    """Different picture files that decode."""
    problems: dict[str, list[str]]
    """Reason -> the records refused for it, most frequent reason first."""
    tokens: dict[str, int]
    """Percentile (p0 ... p100) of a good record's tokens; empty without a good record."""
    images_most: int
    """Pictures of the record with most."""
    of: str = "records"
    """What is counted: a record may make several examples of pairs."""

    @property
    def skip_share(self) -> float:
        """Share of records that a run would skip."""
        return (self.total - self.good) / max(self.total, 1)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {**dataclasses.asdict(self), "skip_share": self.skip_share}

    def lines(self) -> list[str]:
        """The report for people."""
        out = [
            f"{self.name}: {self.good} of {self.total} {self.of} are good"
            f" ({self.skip_share:.2%} would be skipped), {self.pictures} pictures decoded"
        ]
        if self.tokens:
            spread = ", ".join(f"{name} {value}" for name, value in self.tokens.items())
            out.append(f"tokens a record: {spread}; pictures a record: at most {self.images_most}")
        for reason, ids in self.problems.items():
            more = ", ..." if len(ids) > _NAMED else ""
            out.append(f"{len(ids):>7}  {reason}: {', '.join(ids[:_NAMED])}{more}")
        return out


def check(
    spec: str,
    config: DataConfig,
    *,
    chat_tokenizer: tokenizer.ChatTokenizer | None = None,
    prepare: images.Preparation,
    num_patches: Spans = 16,
    patching: Patching | None = None,
) -> Report:
    """Read a data file to the last pixel.

    Args:
        spec: as for :func:`jaxvlm.data.formats.read`.
        config: limits on length and pictures.
        chat_tokenizer: None builds a word tokenizer from the file.
        prepare: how a picture becomes pixels.
        num_patches: what a picture is in a row.
        patching: how pictures of any size are cut; ``None`` where they have one size.

    Raises:
        DataError: the file as a whole can't be used.
    """
    records, problems = formats.read(spec, config.image_root)
    total = len(records) + len(problems)
    chat_tokenizer = chat_tokenizer or tokenizer.build(chat.texts(records))
    corpus, unfit = chat.encode(records, chat_tokenizer, num_patches)
    problems = problems + unfit
    broken: dict[int, str] = {}
    for i, path in enumerate(corpus.paths):
        try:
            images.load(path, prepare, config.max_pixels)
        except ImageError as error:
            broken[i] = str(error)
    limits, good = packing.limits_of(config, patching), []
    for i, source in enumerate(corpus.source.tolist()):
        reasons = [broken[p] for p in corpus.pictures[i] if p in broken]
        reason = (reasons or limits.exceeded(corpus, i))[0]
        if reason:
            problems.append(Problem(records[source].id, reason))
        else:
            good.append(i)
    return Report(
        name=spec,
        total=total,
        good=len(good),
        pictures=len(corpus.paths) - len(broken),
        problems=by_reason(problems),
        tokens=percentiles(corpus.length[good]),
        images_most=max((len(corpus.pictures[i]) for i in good), default=0),
    )


def by_reason(problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Reason -> the records refused for it, most frequent reason first."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for problem in problems:
        found[problem.reason].append(problem.id)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """p0 ... p100 of some lengths; empty of none."""
    if not len(lengths):
        return {}
    return {f"p{p}": int(np.percentile(lengths, p)) for p in _PERCENTILES}
