"""SkyPilot: a task for ``sky jobs launch``."""

from __future__ import annotations

from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import FILE, Job, Rendered, as_yaml, exports, setup
from jaxvlm.launch.tpu_vms import RUNTIMES, TYPES
from jaxvlm.parallel.distributed.exit_status import LOST

GPUS = {"a100-40gb": "A100", "a100": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200",
        "gb200": "GB200", "rtx4090": "RTX4090", "rtx6000ada": "RTX6000-Ada",
        "rtxpro6000": "RTXPRO6000"}  # fmt: skip
"""Machine -> SkyPilot's name of its accelerator (``sky show-gpus``)."""


def render(job: Job, install: str = "", spot: bool = False, cloud: str = "") -> Rendered:
    """Write a task of one process a node.

    Args:
        job: to run; with an image, in its container.
        install: what ``pip install`` is given in the setup; "": nothing.
        spot: whether machines may be taken back.
        cloud: where, such as ``gcp`` or ``aws/us-east-1``; "": wherever it is cheapest.

    Raises:
        ConfigError: SkyPilot has no such machine.
    """
    machine = job.machine
    resources: dict[str, Any] = {}
    if job.is_tpu:
        if machine.slices > 1:
            raise ConfigError("launch sky takes one TPU slice; several are for gke, xpk or queued")
        kind, size = TYPES[machine.name]
        resources["accelerators"] = f"tpu-{kind}-{machine.devices * size}:1"
        resources["accelerator_args"] = {"runtime_version": RUNTIMES[machine.name]}
    elif job.gpus:
        if machine.name not in GPUS:
            known = ", ".join(GPUS)
            raise ConfigError(f"launch sky: SkyPilot has no {machine.name}; it has {known}")
        resources["accelerators"] = f"{GPUS[machine.name]}:{job.gpus}"
    else:
        resources["cpus"] = f"{machine.devices_per_host}+"
    if cloud:
        resources["infra"] = cloud
    if spot:
        resources["use_spot"] = True
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    resources["job_recovery"] = {
        "max_restarts_on_errors": 0,
        # Of a task whose process was killed SkyPilot says 137.
        "recover_on_exit_codes": [LOST, 134, 137, 139, 143],
    }
    task: dict[str, Any] = {"name": job.name, "num_nodes": 1 if job.is_tpu else machine.hosts}
    task["resources"] = resources
    if install:
        task["setup"] = setup(install)
    path = 'export PATH="$HOME/.jaxvlm/bin:$PATH"\n' if install else ""
    distributed = "export JAXVLM_DISTRIBUTED=auto\n" if job.is_tpu else ""
    task["run"] = path + distributed + exports(job) + f"exec {job.line}\n"
    head = f"sky jobs launch -n {job.name} {job.name}.yaml"
    call = ("sky", "jobs", "launch", "--yes", "--detach-run", "-n", job.name, FILE)
    note = f"to follow: sky jobs logs -n {job.name}; to stop: sky jobs cancel -n {job.name}"
    return Rendered({f"{job.name}.yaml": as_yaml(head, task)}, call, note)
