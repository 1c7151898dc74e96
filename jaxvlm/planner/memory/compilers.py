"""What each platform's compiler does to a traced program, as far as memory is concerned."""

from __future__ import annotations

from typing import NamedTuple


class Compiler(NamedTuple):
    """Read from XLA's buffer assignments, JAX 0.10.2, except what is marked as fitted."""

    runs_when_ready: bool = False
    """XLA for CPUs runs operations as soon as their operands are ready. So both moments are copied
    at the start of the step, and their old buffers hold later values until the moments are written
    again; transposed matrices that loops read are copied (``xla_passes._turned``); stacked outputs
    exist from the start of a loop over microbatches; sums of gradients are computed in place.
    """
    reduces_at_end: bool = False
    """Gradients of microbatches that are not sharded are all-reduced at once, out of place, when
    all of them are complete.
    """
    gathered_gradients: float = 0.0
    """Fraction of the optimizer's shard of all gradients that is alive together with the new
    parameters all-gathered from shards (ZeRO-1 and 2; fitted): XLA for GPUs gathers all of them
    before it copies the first one into place. Parameters that are gathered along their first dim
    are written in place. 0: no parameter exists twice.
    """
    gathers_apart: bool = False
    """An updated parameter that is all-gathered in the layout that it is stored in
    (``tpu_padding.keeps_layout``) has a buffer of its own until the end of the step, when it is
    copied into the old one's place. The old one is copied at the start, as if both were needed at
    the same time; its first buffer then holds other values. Others are transposed into place.
    """
    updates_by_rows: bool = False
    """A table is updated row by row, as its gradient is added up. Where its shard is stored in
    another layout (``tpu_padding.minor_most``), it is copied for the update, and both moments too.
    """
    fills_stacks_first: bool = False
    """Stacked outputs of the program's own scans exist from its start: they are filled with zeros
    first.
    """
    copies_per_expert: bool = False
    """XLA's own grouped matmul copies the tokens once per expert, with zeros for the tokens of
    others.
    """
    tiled: bool = False
    """Arrays are padded to tiles, see :mod:`jaxvlm.planner.memory.tpu_padding`."""
    transposes_gathered: bool = False
    """Parameters that loops all-gather along a dim other than a layer's first are transposed before
    the loop, that dim first (see ``xla_passes._transposed``): XLA for GPUs sends contiguous memory.
    """
    shares_gathers: bool = False
    """A parameter that several operations of a loop's body read is all-gathered once for all of
    them.
    """
    hoists_gathers: bool = False
    """Parameters outside of layers that a loop over microbatches reads are all-gathered once,
    before it.
    """
    sinks_scalars: bool = False
    """A broadcast scalar is computed within a backward loop that reads it; for forward loops it is
    an array, which exists from the start of the program.
    """
    fuses_reductions: bool = False
    """A matmul, a row reduction of its result, and the elementwise result of both are one kernel.
    """
    separate_softmax_gradient: bool = False
    """The elementwise result of a value and of its row reduction (a softmax's gradient) is a kernel
    of its own, which does not write in place.
    """


PLAIN = Compiler()
"""A compiler that does none of these."""
COMPILERS = {
    "cpu": Compiler(
        runs_when_ready=True, reduces_at_end=True, fills_stacks_first=True,
        copies_per_expert=True, shares_gathers=True, hoists_gathers=True, sinks_scalars=True,
        fuses_reductions=True,
    ),
    "gpu": Compiler(
        gathered_gradients=0.4, fills_stacks_first=True, copies_per_expert=True,
        transposes_gathered=True, shares_gathers=True, hoists_gathers=True, sinks_scalars=True,
        separate_softmax_gradient=True,
    ),
    "tpu": Compiler(tiled=True, gathers_apart=True, updates_by_rows=True),
}  # fmt: skip
"""By platform."""
