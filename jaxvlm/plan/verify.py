"""A way's real train step, compiled for devices that need not be there: the compiler's own word."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxvlm.build.assemble import assemble, split
from jaxvlm.build.losses import make_loss
from jaxvlm.build.model import build_model
from jaxvlm.config import ConfigError, ModelConfig, TrainConfig
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.optim.schedule import make_schedule
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.plan import absent, collectives, pairs, topology
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.search import Found
from jaxvlm.plan.ways import setup_of
from jaxvlm.train import programs
from jaxvlm.types import Batch, Pairs

_FLAGS = {
    "cpu": "--xla_force_host_platform_device_count={devices}",
    # With no GPU there is nothing to tune by, and Triton's matmuls find no tiles for some widths.
    "gpu": "--xla_gpu_enable_triton_gemm=false",
    "tpu": "",
}
_SHOWN = 6


def prepare(machine: Machine) -> None:
    """Tell XLA what it will compile for; to be called before JAX has a backend."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    flag, given = _FLAGS[machine.platform], os.environ.get("XLA_FLAGS", "")
    if flag and flag.split("=")[0] not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag.format(devices=machine.devices)}".strip()


def devices_of(machine: Machine) -> list[Any]:
    """The machine's devices as its compiler knows them.

    Raises:
        ConfigError: no compiler knows them, or it is not installed.
    """
    if machine.platform == "cpu":
        here = jax.devices("cpu")
        if len(here) < machine.devices:
            raise ConfigError(
                f"--verify: JAX has {len(here)} CPU devices, not {machine.devices}; "
                f"XLA_FLAGS={_FLAGS['cpu'].format(devices=machine.devices)} makes them"
            )
        return here[: machine.devices]
    if machine.platform == "gpu" and machine.name not in topology.gpus():
        raise ConfigError(
            f"--verify: the compiler's target for {machine.name} is not known; "
            f"{', '.join(topology.gpus())} and TPUs (v4, v5e, v5p, v6e) are"
        )
    size = machine.topology or machine.devices
    return topology.devices(f"{machine.name}:{size}", machine.slices if machine.topology else 1)


def compiled(setup: Setup, devices: Sequence[Any], of: TrainConfig | None = None) -> dict[str, Any]:
    """What the compiler says of a train step.

    Args:
        setup: the step.
        devices: as many as its mesh has.
        of: whose optimizer and loss it has; ``None``: the defaults'.

    Returns:
        ``memory`` (see :func:`jaxvlm.train.programs.memory`), ``sent`` (collectives), and
        ``seconds`` of CPU that it took; or ``why`` there is no program.

    Raises:
        ConfigError: dims that the mesh does not divide.
    """
    config = setup.config
    if setup.platform == "gpu":  # what memory is planned for
        config = dataclasses.replace(config, attention="xla")
    mesh = make_mesh(setup.mesh, devices)
    pairing = setup.pairs
    model: Any = build_model(
        config, mesh, setup.strategy, vectors=pairing.vectors if pairing else None
    )
    run = of or (pairing.run if pairing else TrainConfig())
    own, _ = split(model, model.shapes, setup.frozen)
    tx = make_optimizer(
        run.optim, make_schedule(run.optim, run.steps), {path: model.logical[path] for path in own}
    )
    loss = make_loss(run, mesh)
    parts, chunks = (1, pairing.chunks) if pairing else (setup.microbatches, None)
    step, state, _ = assemble(model, loss, tx, parts, setup.frozen, chunks=chunks)
    batch = _batch(setup, mesh)
    start = time.process_time()
    # JAX 0.12 asks the mesh around a Triton kernel for which GPU it is; one device has none around.
    one = mesh.size == 1
    around = jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if one else contextlib.nullcontext()
    try:
        with around:
            program = step.lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:  # it does not fit, or the compiler has a bug
        return {"why": str(error).strip()[:2000]}
    return {
        "memory": programs.memory(program),
        "sent": collectives.read(program.as_text(), dict(mesh.shape)),
        "seconds": round(time.process_time() - start, 1),
    }


def _batch(setup: Setup, mesh: jax.sharding.Mesh) -> Batch | Pairs:
    """Shapes of the step's batch on ``mesh``."""
    if pairing := setup.pairs:
        return pairs.shapes(setup.config, pairing, setup.rows, batch_sharding(mesh))
    assert isinstance(setup.config, ModelConfig)
    row = (setup.length, setup.pictures, setup.patches)
    return abstract_batch(setup.config, mesh, setup.rows, *row)


def verify(found: Found, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """The best way's step, compiled, beside what was planned.

    Args:
        found: by a search; where nothing fits, what needs least is compiled.
        devices: by :func:`devices_of`.
    """
    plans = found.best[:1] or [plan for plan in (found.nearest,) if plan]
    rows = []
    for plan in plans:
        row: dict[str, Any] = {"text": plan.way.text(), "predicted": round(plan.peak)}
        made = compiled(setup_of(found.question, plan.way), devices, found.question.config)
        if "why" in made:
            rows.append(row | {"why": made["why"].splitlines()[0][:300]})
            continue
        sent = {
            f"{c.kind} {c.dtype} over {' x '.join(c.axes) or 'some'}": c.wire_bytes
            for c in made["sent"][:_SHOWN]
        }
        row |= {"compiled": made["memory"], "seconds": made["seconds"], "collectives": sent}
        rows.append(row)
    return rows


def abstract_batch(
    model: ModelConfig,
    mesh: jax.sharding.Mesh,
    rows: int,
    length: int,
    pictures: int,
    patches: int = 0,
) -> Batch:
    """Shapes of a batch on ``mesh``.

    Args:
        model: dims.
        mesh: whose batch axes split its rows.
        rows: of the batch, over all devices.
        length: tokens of a row.
        pictures: of a row.
        patches: of a row, where pictures come packed.
    """
    return absent.batch(model, rows, length, pictures, patches, batch_sharding(mesh))
