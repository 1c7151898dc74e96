"""Compile a candidate's train step for machines that need not exist, and report its real memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jaxvlm.config import Config, ConfigError, ModelConfig
from jaxvlm.losses.registry import make_loss
from jaxvlm.optim.optimizer import make_optimizer, make_schedule
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.planner.compiled import collectives, topology
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import abstract_devices, pairs
from jaxvlm.planner.search.candidates import setup_of
from jaxvlm.planner.search.search import SearchResult
from jaxvlm.spmd.islands import outer_of
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble, split
from jaxvlm.train import program_memory
from jaxvlm.types import Batch, Pairs

_FLAGS = {
    "cpu": "--xla_force_host_platform_device_count={devices}",
    # Without a GPU there is no autotuning, and Triton's matmuls find no tiles for some widths.
    "gpu": "--xla_gpu_enable_triton_gemm=false",
    "tpu": "",
}
_SHOWN = 6


def prepare(machine: Machine) -> None:
    """Set XLA's flags for the machine; call it before JAX creates a backend."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # two commands at once
    flag, given = _FLAGS[machine.platform], os.environ.get("XLA_FLAGS", "")
    if flag and flag.split("=")[0] not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag.format(devices=machine.devices)}".strip()


def devices_of(machine: Machine) -> list[Any]:
    """The machine's devices, as its compiler describes them.

    Raises:
        ConfigError: no compiler has a target for them, or it is not installed.
    """
    if machine.platform == "cpu":
        local = jax.devices("cpu")
        if len(local) < machine.devices:
            raise ConfigError(
                f"--verify: JAX has {len(local)} CPU devices, not {machine.devices}; "
                f"set XLA_FLAGS={_FLAGS['cpu'].format(devices=machine.devices)}"
            )
        return local[: machine.devices]
    if machine.platform == "gpu" and machine.name not in topology.gpus():
        raise ConfigError(
            f"--verify: there is no compiler target for {machine.name}; "
            f"use {', '.join(topology.gpus())} and TPUs (v4, v5e, v5p, v6e)"
        )
    size = machine.topology or machine.devices
    return topology.devices(f"{machine.name}:{size}", machine.slices if machine.topology else 1)


def lowered(
    setup: StepSetup,
    devices: Sequence[Any],
    config_of_run: Config | None = None,
    batch: Batch | None = None,
) -> jax.stages.Lowered:
    """Lower a train step to StableHLO for the devices' platform, which needs no compiler of it.

    Args:
        setup: the train step.
        devices: as many as its mesh has.
        config_of_run: run whose optimizer and loss are used; ``None`` uses the defaults.
        batch: abstract batch to take instead of the setup's; its shardings are set here.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    mesh = make_mesh(setup.mesh, devices)
    pairing = setup.pairs
    embeddings = pairing.embeddings if pairing else None
    model: Any = build_model(setup.config, mesh, setup.strategy, embeddings=embeddings)
    model = model.holding(dict(setup.held))
    run = config_of_run or (pairing.run if pairing else Config())
    trained, _ = split(model, model.shapes, setup.frozen)
    logical = {path: model.logical[path] for path in trained}
    tx = make_optimizer(run.optim, make_schedule(run.optim, run.steps), logical)
    loss = make_loss(run, mesh)
    parts, mini_batches = (1, pairing.mini_batches) if pairing else (setup.microbatches, None)
    outer = outer_of(model, setup.outer, trained) if setup.outer else None
    step, state, _ = assemble(
        model, loss, tx, parts, setup.frozen, mini_batches=mini_batches, outer=outer
    )
    rows: Batch | Pairs = _batch(setup, mesh)
    if batch is not None:
        rows = jax.tree.map(
            partial(jax.ShapeDtypeStruct.update, sharding=batch_sharding(mesh)), batch
        )
    # JAX 0.12 reads the GPU of a Triton kernel from the ambient mesh; one device has none.
    ambient: Any = contextlib.nullcontext()
    if mesh.size == 1:
        ambient = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with ambient:
        return step.lower(state, rows)


def compiled(
    setup: StepSetup, devices: Sequence[Any], config_of_run: Config | None = None
) -> dict[str, Any]:
    """Compile a train step and read its memory and collectives.

    Args:
        setup: the train step.
        devices: as many as its mesh has.
        config_of_run: run whose optimizer and loss are used; ``None`` uses the defaults.

    Returns:
        ``memory`` (see :func:`jaxvlm.train.program_memory.memory`), ``sent`` (collectives) and
        ``seconds`` of CPU time for the compilation; or ``why`` the compilation failed.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    start = time.process_time()
    try:
        program = lowered(setup, devices, config_of_run).compile()
    except jax.errors.JaxRuntimeError as error:  # it does not fit, or the compiler has a bug
        return {"why": str(error).strip()[:2000]}
    return {
        "memory": program_memory.memory(program),
        "sent": collectives.read(
            str(program.as_text()), dict(make_mesh(setup.mesh, devices).shape)
        ),
        "seconds": round(time.process_time() - start, 1),
    }


def _batch(setup: StepSetup, mesh: jax.sharding.Mesh) -> Batch | Pairs:
    """Abstract batch of the step on ``mesh``."""
    if pairing := setup.pairs:
        return pairs.shapes(setup.config, pairing, setup.rows, batch_sharding(mesh))
    assert isinstance(setup.config, ModelConfig)
    row = (setup.length, setup.images, setup.patches)
    return abstract_batch(setup.config, mesh, setup.rows, *row)


def verify(result: SearchResult, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """Compile the best candidate's train step and compare it with the plan.

    Args:
        result: result of a search; if nothing fits, the candidate that needs least is compiled.
        devices: from :func:`devices_of`.
    """
    plans = result.best[:1] or [plan for plan in (result.nearest,) if plan]
    rows = []
    for plan in plans:
        row: dict[str, Any] = {"text": plan.candidate.text(), "predicted": round(plan.peak)}
        program = compiled(setup_of(result.request, plan.candidate), devices, result.request.config)
        if "why" in program:
            rows.append(row | {"why": program["why"].splitlines()[0][:300]})
            continue
        sent = {
            f"{c.kind} {c.dtype} over {' x '.join(c.axes) or 'some'}": c.wire_bytes
            for c in program["sent"][:_SHOWN]
        }
        row |= {"compiled": program["memory"], "seconds": program["seconds"], "collectives": sent}
        rows.append(row)
    return rows


def abstract_batch(
    model: ModelConfig,
    mesh: jax.sharding.Mesh,
    rows: int,
    length: int,
    images: int,
    patches: int = 0,
) -> Batch:
    """Shapes and shardings of a batch on ``mesh``.

    Args:
        model: dims.
        mesh: its batch axes split the batch.
        rows: packed sequences in the batch, over all devices.
        length: tokens of a packed sequence.
        images: images of a packed sequence.
        patches: patches of a packed sequence, for models with packed images.
    """
    return abstract_devices.batch(model, rows, length, images, patches, batch_sharding(mesh))
