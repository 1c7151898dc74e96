"""What platforms' compilers add to a traced program, as far as memory goes."""

from __future__ import annotations

from typing import NamedTuple


class Compiler(NamedTuple):
    """Read from XLA's buffer assignments, JAX 0.10.2, but for what is said to be fitted."""

    copied: bool = False
    """What is ready first is done first, by XLA for CPUs: both moments are copied at the step's
    begin, and where they lay, what is made later is put until they are written again; heads'
    matrices are turned there (``Passes._scanned``); stacked outputs are there from the begin of a
    loop over chunks; sums of gradients are made in place."""
    sums_behind: bool = False
    """Gradients of microbatches or chunks that no device has a share of are summed over devices at
    once, beside themselves, when all are there."""
    gathers: float = 0.0
    """Of the optimizer's share of all gradients, what is beside new parameters that are made whole
    of shares (ZeRO-1 and 2; fitted): XLA for GPUs gathers all of them before it puts the first in
    its place. Those whose first dim is gathered are made where they belong. 0: none lies twice."""
    early: bool = False
    """A program's own scans have their stacked outputs from its start: filled with zeros first."""
    by_expert: bool = False
    """Rows once for each expert, zeros but for its own: XLA's own grouped matmul."""
    tiled: bool = False
    """See :mod:`jaxvlm.plan.tiles`."""
    turns: bool = False
    """Parameters that loops gather along a dim that is not a layer's first are copied before them,
    that dim first (``passes._turned`` says which): XLA for GPUs sends what lies in one piece."""
    keeps: bool = False
    """A parameter that a loop's operations read whole several times is gathered once for all."""
    lifts: bool = False
    """Parameters of no layer that a loop over parts of a batch reads are gathered once, before it.
    """
    sinks: bool = False
    """One number, broadcast, is made within a loop backward that reads it; for loops forward it is
    an array, at a program's top from its start."""
    joins: bool = False
    """A matmul, its rows' sums and what is made of both are one kernel."""
    apart: bool = False
    """What is made of a value and of its rows' sums (a softmax's gradient) is written beside it: a
    kernel of its own, which writes over nothing."""


PLAIN = Compiler()
"""Nothing."""
COMPILERS = {
    "cpu": Compiler(
        copied=True, sums_behind=True, early=True, by_expert=True, keeps=True, lifts=True,
        sinks=True, joins=True,
    ),
    "gpu": Compiler(
        gathers=0.4, early=True, by_expert=True, turns=True, keeps=True, lifts=True, sinks=True,
        apart=True,
    ),
    "tpu": Compiler(tiled=True),
}  # fmt: skip
"""By platform."""
