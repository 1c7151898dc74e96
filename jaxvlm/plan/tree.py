"""The field's decision tree, with one model's numbers on its branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxvlm.config import LoraConfig
from jaxvlm.plan.question import Question, with_network
from jaxvlm.plan.search import CARE, Found, Memory, Plan, capacity, possible
from jaxvlm.plan.ways import Way


class Branch(NamedTuple):
    """A question of the tree."""

    name: str
    asks: str
    """What a person would ask at it."""
    fits: Callable[[Way], bool]
    """Ways that are of it."""
    lora: bool = False
    """With adapters instead of all that is trained."""
    alone: bool = False
    """On one device, with its share of the rows."""
    of_pairs: tuple[str, str] = ("", "")
    """What it is called, and what it asks, where pairs are trained on."""


def _plain(way: Way) -> bool:
    mesh = way.mesh
    return mesh.tensor == mesh.context == mesh.stage == 1


BRANCHES = (
    Branch("single", "Does it fit on one device?", lambda w: w.preset == "single", alone=True),
    Branch(
        "DDP",
        "With a copy on every device, its share of the batch at once?",
        lambda w: w.preset == "ddp" and _plain(w) and w.microbatches == 1,
    ),
    Branch(
        "DDP, in microbatches",
        "With a copy on every device, its share in parts?",
        lambda w: w.preset == "ddp" and _plain(w) and w.microbatches > 1,
        of_pairs=("DDP + GradCache", "With a copy on every device, its vectors made in chunks?"),
    ),
    Branch(
        "FSDP + LoRA",
        "Weights over all devices, adapters trained?",
        lambda w: w.preset in ("fsdp", "hybrid_shard", "single") and _plain(w),
        lora=True,
    ),
    Branch(
        "FSDP",
        "Weights and moments over all devices, all trained as asked?",
        lambda w: (
            w.preset in ("zero1", "zero2", "fsdp", "fsdp_no_reshard", "hybrid_shard", "hpz")
            and _plain(w)
        ),
    ),
    Branch(
        "3-D",
        "Tensor, context or pipeline parallel besides?",
        lambda w: not _plain(w),
    ),
)


def branches(found: Found) -> list[dict[str, Any]]:
    """Each branch with the fastest way of it that fits, or what needs least.

    Memory of ways that the search has not looked at closely is by formula.
    """
    made, asked = [], found.question
    for branch in BRANCHES:
        if asked.pairs and all(branch.of_pairs):
            branch = branch._replace(name=branch.of_pairs[0], asks=branch.of_pairs[1])
        question = _for(asked, branch)
        same = question.config.network is asked.config.network
        own = found.known if question is asked else None
        own = own or (found.known.of(question) if same else Memory(question))
        if question is asked:
            ways = [seen.way for seen in found.seen if branch.fits(seen.way)]
        else:
            ways = list(possible(own, {}, branch.fits))
        made.append(_answer(branch, own, ways, found.best if question is asked else []))
    return made


def _for(question: Question, branch: Branch) -> Question:
    config, machine = question.config, question.machine
    if branch.lora and not config.network.lora.rank:
        network = dataclasses.replace(config.network, lora=LoraConfig(rank=16, alpha=32.0))
        optim = dataclasses.replace(config.optim, frozen=())
        config = with_network(dataclasses.replace(config, optim=optim), network)
        question = question._replace(config=config)
    if branch.alone and machine.devices > 1:
        rows = max(1, question.rows // machine.devices)
        data = dataclasses.replace(config.data, batch_size=rows)
        one = machine._replace(devices=1, a_host=1, hosts=1, slices=1)
        config = dataclasses.replace(config, data=data)
        question = question._replace(machine=one, config=config)
    return question


def _answer(branch: Branch, known: Memory, ways: list[Way], best: list[Plan]) -> dict[str, Any]:
    limit = capacity(known.question)
    answer: dict[str, Any] = {"name": branch.name, "asks": branch.asks, "fits": False}
    if not ways:
        return answer | {"text": "not on this machine, or not with these dims and rows"}
    of_it = [plan for plan in best if branch.fits(plan.way)]
    fitting = [way for way in ways if not limit or CARE * known.about(way) <= limit]
    if of_it:  # the search looked at it more closely
        way, peak, traced = of_it[0].way, of_it[0].peak, of_it[0].traced
    elif fitting:
        way = min(fitting, key=lambda way: known.time(way).total)
        peak, traced = known.about(way), False
    else:
        peak, way = min(((known.about(way), way) for way in ways), key=lambda x: x[0])
        traced = False
    time = known.time(way)
    return answer | {
        "fits": bool(of_it or fitting) if limit else None,
        "text": way.text(),
        "peak": round(peak),
        "from": "trace" if traced else "formula",
        "seconds": time.total or None,
        "tokens_per_s": time.tokens_per_s if time.total else None,
        "mfu": time.mfu if time.total else None,
    }
