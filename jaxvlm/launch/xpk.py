"""xpk: one call of it, which makes a JobSet with Kueue on its clusters."""

from __future__ import annotations

import base64
import re

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import Job, Rendered, exports, needs
from jaxvlm.launch.tpu_vms import accelerator_type
from jaxvlm.parallel.distributed.exit_status import LOST

GPUS = {"a100-40gb": "a100-40gb-{}", "h100": "h100-80gb-{}", "h200": "h200-141gb-{}",
        "b200": "b200-{}", "gb200": "gb200-{}"}  # fmt: skip
"""Machine -> xpk's device type, by GPUs of a host."""


def render(
    job: Job, cluster: str = "", zone: str = "", project: str = "", priority: str = "medium"
) -> Rendered:
    """Write the script of a workload, and the call of ``xpk workload create``.

    Args:
        job: to run, with its image.
        cluster: that xpk made.
        zone, project: of it; "": gcloud's own.
        priority: of the workload, as Kueue orders it.

    Raises:
        ConfigError: a flag is missing, or xpk has no such machine.
    """
    needs("cluster", cluster, "xpk", "my-cluster")
    needs("image", job.image, "xpk", "europe-docker.pkg.dev/PROJECT/REPOSITORY/jaxvlm:0.1")
    machine = job.machine
    if job.is_tpu:
        size = [f"--tpu-type={accelerator_type(job)}", f"--num-slices={machine.slices}"]
    elif machine.name in GPUS:
        size = [f"--device-type={GPUS[machine.name].format(job.gpus)}"]
        size += [f"--num-nodes={machine.hosts}"]
    else:
        known = ", ".join(GPUS)
        raise ConfigError(f"launch xpk: xpk has no {machine.name}; it has TPUs and {known}")
    script = exports(job) + f"exec {job.line}"
    # xpk writes the command into YAML as it is, between double quotes.
    plain = not re.search(r"[\"\\\n$]", script)
    encoded = base64.b64encode(script.encode()).decode()
    command = script if plain else f"exec bash <(echo {encoded} | base64 -d)"
    call = ["xpk", "workload", "create", f"--workload={job.name}", f"--cluster={cluster}", *size]
    call += [f"--{n}={value}" for n, value in (("zone", zone), ("project", project)) if value]
    call += [f"--docker-image={job.image}", f"--priority={priority}"]
    call += [f"--restart-on-exit-codes={LOST}", f"--max-restarts={job.restarts}"]
    call += [f"--command={command}"]
    note = f"to stop: xpk workload delete --workload={job.name} --cluster={cluster}"
    return Rendered({f"{job.name}.sh": script + "\n"}, tuple(call), note)
