"""Divide conversations among simulated sites, by a Dirichlet distribution over their labels."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Sequence

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.data.sources import tool_use
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Record
from jaxvlm.data.sources.member_names import with_file


def partition(records: Sequence[Record], sites: int, alpha: float, seed: int) -> list[list[int]]:
    """Divide records among sites; those that show the same images stay together.

    The label of an image is the rarest answer of its records in all of the data. Each label's
    images are divided by proportions that are drawn from a symmetric Dirichlet distribution. What
    rounding to whole images leaves is carried from label to label, so that the sites' totals follow
    the proportions too, however few images a label has.

    Args:
        records: of all sites.
        sites: how many.
        alpha: concentration: near 0 each label is at one site; infinity divides all alike, to one
            image of each label and one in all.
        seed: of the draws.

    Returns:
        For each site, indices of its records, ascending.

    Raises:
        ConfigError: a site gets nothing.

    Source: Hsu et al., arXiv 1909.06335.
    """
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for i, record in enumerate(records):
        groups[record.images or (record.id,)].append(i)
    counts = collections.Counter(record.turns[-1].content for record in records)
    labels = collections.defaultdict(list)
    for group in groups.values():
        answers = {records[i].turns[-1].content for i in group}
        labels[min(answers, key=lambda a: (counts[a], a))].append(group)
    draws = np.random.Generator(np.random.PCG64(seed))
    result: list[list[int]] = [[] for _ in range(sites)]
    owed = np.zeros(sites)
    for label in sorted(labels):
        own = labels[label]
        equal = np.full(sites, 1 / sites)
        shares = equal if np.isinf(alpha) else draws.dirichlet(np.full(sites, alpha))
        parts, owed = _whole(shares * len(own), owed)
        order = draws.permutation(len(own))
        for site, part in enumerate(np.split(order, np.cumsum(parts)[:-1])):
            result[site] += [i for group in part for i in own[group]]
    for site, indices in enumerate(result):
        if not indices:
            raise ConfigError(_without_data(site, sites, alpha, len(groups)))
    return [sorted(indices) for indices in result]


def _whole(exact: np.ndarray, owed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round shares to whole numbers of the same sum, each down or up, by what sites are owed.

    Args:
        exact: f64[sites]: shares of a label's images; their sum is whole.
        owed: f64[sites]: what rounding has left each site short of, or below 0 given it too much.

    Returns:
        i64[sites]: the shares, and what is owed now.
    """
    whole = np.floor(exact).astype(int)
    owed = owed + (exact - whole)
    more = np.argsort(-owed, kind="stable")[: round(exact.sum()) - whole.sum()]
    whole[more] += 1
    owed[more] -= 1
    return whole, owed


def _without_data(site: int, sites: int, alpha: float, count: int) -> str:
    if count < sites:
        return (
            f"data.train has {count} different images (or records without one) for {sites} sites; "
            "lower --config.federate.sites, or give more data"
        )
    return (
        f"--alpha={alpha:g} leaves site {site} of {sites} without data; raise --alpha, take "
        "another --config.seed, or lower --config.federate.sites"
    )


def json_lines(records: Sequence[Record]) -> bytes:
    """Conversations as JSON lines in UTF-8, as a data file has them."""
    return "".join(json.dumps(_item(x), ensure_ascii=False) + "\n" for x in records).encode()


def _item(record: Record) -> dict[str, object]:
    images = iter(record.images)
    messages = []
    for turn in record.turns:
        texts = turn.content.split(PLACEHOLDER)
        parts: list[dict[str, str]] = []
        for i, text in enumerate(texts):
            if i:
                parts.append({"type": "image", "image": with_file(next(images), os.path.realpath)})
            if text:
                parts.append({"type": "text", "text": text})
        message: dict[str, object] = {"role": turn.role, "content": parts}
        if turn.calls:
            message |= tool_use.of_message(turn.role, turn.calls)
        messages.append(message if turn.trained else {**message, "loss": False})
    functions = {"tools": described} if (described := record.turns[0].tools) else {}
    return {"id": record.id, "messages": messages, **functions}
