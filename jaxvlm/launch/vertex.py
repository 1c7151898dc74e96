"""Vertex AI: a custom job's configuration for ``gcloud ai custom-jobs create``."""

from __future__ import annotations

from typing import Any

from jaxvlm.config import Config, ConfigError
from jaxvlm.launch.job import FILE, STOPPED, Job, Rendered, as_yaml, needs

GPUS = {
    "a100-40gb": ("a2-highgpu-{}g", "NVIDIA_TESLA_A100", (1, 2, 4, 8)),
    "a100": ("a2-ultragpu-{}g", "NVIDIA_A100_80GB", (1, 2, 4, 8)),
    "h100": ("a3-highgpu-{}g", "NVIDIA_H100_80GB", (1, 2, 4, 8)),
    "h200": ("a3-ultragpu-{}g", "NVIDIA_H200_141GB", (8,)),
    "b200": ("a4-highgpu-{}g", "NVIDIA_B200", (8,)),
}
"""Machine -> machine type by GPUs of a host, accelerator, and which numbers there are. Source:
cloud.google.com/vertex-ai/docs/training/configure-compute"""
REDUCER = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
"""Source: cloud.google.com/vertex-ai/docs/training/distributed-training#reduction_server"""


def render(
    job: Job,
    region: str = "",
    project: str = "",
    reduction_servers: int = 0,
    config: Config | None = None,
    spot: bool = False,
) -> Rendered:
    """Write the worker pools: the first host in pool 0, the others in pool 1.

    Args:
        job: to run, with its image.
        region, project: where; project "": gcloud's own.
        reduction_servers: hosts of pool 2 that sum what NCCL all-reduces, where the image has
            Google's plugin of NCCL (``google-reduction-server``).
        config: settings of the run, where the command trains.
        spot: whether machines may be taken back.

    Raises:
        ConfigError: a flag is missing, the machine is not Vertex AI's, or Reduction Server would
            have nothing to sum.
    """
    needs("image", job.image, "vertex", "europe-docker.pkg.dev/PROJECT/REPOSITORY/jaxvlm:0.1")
    needs("region", region, "vertex", "europe-west4")
    machine = job.machine
    if machine.name not in GPUS:
        raise ConfigError(
            f"launch vertex takes GPUs ({', '.join(GPUS)}), not {machine.name}; TPU slices are "
            "for launch queued, gke or xpk"
        )
    if reduction_servers:
        _check_reduction(job, config)
    kind, accelerator, counts = GPUS[machine.name]
    if job.gpus not in counts:
        known = " or ".join(map(str, counts))
        raise ConfigError(f"launch vertex: a host has {known} {machine.name}, not {job.gpus}")
    pool = {
        "machineSpec": {
            "machineType": kind.format(job.gpus),
            "acceleratorType": accelerator,
            "acceleratorCount": job.gpus,
        },
        "replicaCount": 1,
        "containerSpec": {
            "imageUri": job.image,
            "command": job.command,
            "env": [{"name": name, "value": value} for name, value in (*job.environment, STOPPED)],
        },
    }
    pools: list[dict[str, Any]] = [pool]
    if machine.hosts > 1:
        pools.append(pool | {"replicaCount": machine.hosts - 1})
    if reduction_servers:
        pools.append(
            {
                "machineSpec": {"machineType": "n1-highcpu-16"},
                "replicaCount": reduction_servers,
                "containerSpec": {"imageUri": REDUCER},
            }
        )
    # Vertex AI can't tell exit statuses apart: the job starts again when a machine is lost.
    scheduling: dict[str, Any] = {"restartJobOnWorkerRestart": True}
    if spot:
        scheduling["strategy"] = "SPOT"
    spec = {"workerPoolSpecs": pools, "scheduling": scheduling}
    head = "A CustomJobSpec of Vertex AI."
    call = ["gcloud", "ai", "custom-jobs", "create", f"--region={region}"]
    call += [f"--project={project}"] if project else []
    call += [f"--display-name={job.name}", f"--config={FILE}"]
    return Rendered({f"{job.name}.yaml": as_yaml(head, spec)}, tuple(call))


def _check_reduction(job: Job, config: Config | None) -> None:
    """Refuse Reduction Server where nothing would pass through it."""
    name = config.strategy.name if config else ""
    if name == "ddp" and job.machine.hosts > 1:
        return
    why = (
        "one host has nothing to send"
        if job.machine.hosts < 2
        else f"config.strategy.name={name!r} does not all-reduce gradients whole"
    )
    raise ConfigError(
        f"--reduction_servers: Reduction Server sums NCCL's all-reduce, and nothing else (not "
        f"reduce-scatter or all-gather), and {why}; leave it out, or train with "
        "--config.strategy.name=ddp on several hosts"
    )
