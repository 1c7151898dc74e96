"""A decision tree over strategies, with one model's numbers on its branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxvlm.config import LoraConfig
from jaxvlm.planner.request.request import PlanRequest, with_network
from jaxvlm.planner.search.candidate_memory import CARE, Memory, Plan, capacity
from jaxvlm.planner.search.candidates import Candidate
from jaxvlm.planner.search.search import SearchResult, possible


class Branch(NamedTuple):
    """A branch of the decision tree."""

    name: str
    asks: str
    """The question at this branch."""
    fits: Callable[[Candidate], bool]
    """Whether a candidate belongs to this branch."""
    lora: bool = False
    """With LoRA adapters instead of everything that is trained."""
    alone: bool = False
    """On one device, with its share of the batch."""
    of_pairs: tuple[str, str] = ("", "")
    """Its name and question when training on pairs."""


def _plain(candidate: Candidate) -> bool:
    mesh = candidate.mesh
    return mesh.tensor == mesh.context == mesh.pipeline == 1


BRANCHES = (
    Branch("single", "Does it fit on one device?", lambda w: w.preset == "single", alone=True),
    Branch(
        "DDP",
        "With a replica on every device, its share of the batch at once?",
        lambda w: w.preset == "ddp" and _plain(w) and w.microbatches == 1,
    ),
    Branch(
        "DDP, in microbatches",
        "With a replica on every device, its share in microbatches?",
        lambda w: w.preset == "ddp" and _plain(w) and w.microbatches > 1,
        of_pairs=("DDP + GradCache", "With a replica on every device, its share in mini-batches?"),
    ),
    Branch(
        "FSDP + LoRA",
        "Weights sharded over all devices, adapters trained?",
        lambda w: w.preset in ("fsdp", "hybrid_shard", "single") and _plain(w),
        lora=True,
    ),
    Branch(
        "FSDP",
        "Weights and moments sharded over all devices?",
        lambda w: (
            w.preset in ("zero1", "zero2", "fsdp", "fsdp_no_reshard", "hybrid_shard", "hpz")
            and _plain(w)
        ),
    ),
    Branch(
        "3-D",
        "Tensor, context or pipeline parallelism in addition?",
        lambda w: not _plain(w),
    ),
)


def branches(result: SearchResult) -> list[dict[str, Any]]:
    """Each branch with its fastest candidate that fits, or else the one that needs least memory.

    Memory of candidates that the search did not trace is by formula.
    """
    answers, base_request = [], result.request
    for branch in BRANCHES:
        if base_request.pairs and all(branch.of_pairs):
            branch = branch._replace(name=branch.of_pairs[0], asks=branch.of_pairs[1])
        request = _request_for(base_request, branch)
        same_network = request.config.network is base_request.config.network
        memory = result.memory if request is base_request else None
        memory = memory or (result.memory.of(request) if same_network else Memory(request))
        if request is base_request:
            every = (seen.candidate for seen in result.considered)
            candidates = [candidate for candidate in every if branch.fits(candidate)]
        else:
            candidates = list(possible(memory, {}, branch.fits))
        best = result.best if request is base_request else []
        answers.append(_answer(branch, memory, candidates, best))
    return answers


def _request_for(request: PlanRequest, branch: Branch) -> PlanRequest:
    config, machine = request.config, request.machine
    if branch.lora and not config.network.lora.rank:
        network = dataclasses.replace(config.network, lora=LoraConfig(rank=16, alpha=32.0))
        optim = dataclasses.replace(config.optim, frozen=())
        config = with_network(dataclasses.replace(config, optim=optim), network)
        request = request._replace(config=config)
    if branch.alone and machine.devices > 1:
        rows = max(1, request.rows // machine.devices)
        data = dataclasses.replace(config.data, batch_size=rows)
        one = machine._replace(devices=1, devices_per_host=1, hosts=1, slices=1)
        mesh = dataclasses.replace(config.mesh, island=1)
        config = dataclasses.replace(config, data=data, mesh=mesh)
        request = request._replace(machine=one, config=config)
    return request


def _answer(
    branch: Branch, memory: Memory, candidates: list[Candidate], best: list[Plan]
) -> dict[str, Any]:
    limit = capacity(memory.request)
    answer: dict[str, Any] = {"name": branch.name, "asks": branch.asks, "fits": False}
    if not candidates:
        return answer | {"text": "not possible on this machine, or with these dims and batch"}
    plans = [plan for plan in best if branch.fits(plan.candidate)]
    sizes = {candidate: memory.bytes_by_formula(candidate) for candidate in candidates}
    fitting = [c for c, size in sizes.items() if not limit or CARE * size <= limit]
    if plans:  # the search may have traced it
        candidate, peak, traced = plans[0].candidate, plans[0].peak, plans[0].traced
    elif fitting:
        candidate = min(fitting, key=lambda candidate: memory.time(candidate).total)
        peak, traced = sizes[candidate], False
    else:
        candidate = min(sizes, key=lambda candidate: sizes[candidate])
        peak, traced = sizes[candidate], False
    time = memory.time(candidate)
    return answer | {
        "fits": bool(plans or fitting) if limit else None,
        "text": candidate.text(),
        "peak": round(peak),
        "from": "trace" if traced else "formula",
        "seconds": time.total or None,
        "tokens_per_s": time.tokens_per_s if time.total else None,
        "mfu": time.mfu if time.total else None,
    }
