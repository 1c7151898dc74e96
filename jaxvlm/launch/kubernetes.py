"""GKE and other Kubernetes clusters with JobSet: a manifest for ``kubectl apply``."""

from __future__ import annotations

from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import FILE, PORT, STOPPED, Job, Rendered, as_yaml, needs
from jaxvlm.parallel.distributed.exit_status import ERRORS

GPUS = {
    "a100-40gb": "nvidia-tesla-a100", "a100": "nvidia-a100-80gb", "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb", "b200": "nvidia-b200", "gb200": "nvidia-gb200",
    "rtxpro6000": "nvidia-rtx-pro-6000",
}  # fmt: skip
"""Machine -> GKE's label of its GPU. Source:
cloud.google.com/kubernetes-engine/docs/concepts/gpus"""
TPUS = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice", "7x": "tpu7x",
}  # fmt: skip
"""Machine -> GKE's label of its TPU. Source:
cloud.google.com/kubernetes-engine/docs/concepts/tpus"""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GPU_LABEL = "cloud.google.com/gke-accelerator"
_TPU_LABEL, _TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"


def render(
    job: Job, namespace: str = "default", queue: str = "", claim: str = "", mount: str = "/runs"
) -> Rendered:
    """Write a JobSet: one job of a pod a host; on TPUs, one job a slice.

    A pod that ends with 1 or 2 fails the whole JobSet at once (``podFailurePolicy``); any other
    end, such as 75 or a lost node, starts all pods again.

    Args:
        job: to run, with its image.
        namespace: of the cluster.
        queue: Kueue's local queue; "": none.
        claim: persistent volume claim that all pods mount; "": none.
        mount: where it is mounted.

    Raises:
        ConfigError: no image is given.
    """
    needs("image", job.image, "gke", "europe-docker.pkg.dev/PROJECT/REPOSITORY/jaxvlm:0.1")
    metadata: dict[str, Any] = {"name": job.name, "namespace": namespace}
    if job.is_tpu:
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {exclusive: "cloud.google.com/gke-nodepool"}
    if queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    errors = {
        "name": "errors",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    slices = job.machine.slices if job.is_tpu else 1
    work = _work(job, slices)
    pod = work["template"]["spec"]
    if claim:
        mounts = pod["containers"][0].setdefault("volumeMounts", [])
        mounts.append({"name": "runs", "mountPath": mount})
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": claim}}
        pod.setdefault("volumes", []).append(volume)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [errors]},
            "replicatedJobs": [
                {"name": "workers", "replicas": slices, "template": {"spec": work}},
            ],
        },
    }
    head = f"kubectl apply -f {job.name}.yaml; kubectl logs -f jobset/{job.name} follows it"
    files = {f"{job.name}.yaml": as_yaml(head, jobset)}
    return Rendered(files, ("kubectl", "apply", "-f", FILE), f"to stop: kubectl delete -f {FILE}")


def _work(job: Job, slices: int) -> dict[str, Any]:
    """A Job's spec: a pod for each host of a slice, or of all GPUs."""
    pods = job.machine.devices // slices // _devices_of_pod(job)
    container: dict[str, Any] = {
        "name": "jaxvlm",
        "image": job.image,
        "command": job.command,
        "env": _environment(job),
    }
    if resource := _resource(job):
        container["resources"] = {"limits": resource}
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 180}
    if selector := _selector(job):
        pod["nodeSelector"] = selector
    if job.gpus:
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [taint]
        # NCCL shares buffers there, more than a container's 64 MB.
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    pod["containers"] = [container]
    exits = {"containerName": "jaxvlm", "operator": "In", "values": list(ERRORS)}
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exits}]},
        "template": {"spec": pod},
    }


def _environment(job: Job) -> list[dict[str, Any]]:
    """Variables of a pod: GKE itself describes the hosts of TPU slices."""
    pairs = (*job.environment, STOPPED)
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in pairs]
    if job.machine.hosts < 2 or job.is_tpu:
        return env
    own = {
        "JAXVLM_COORDINATOR": f"{job.name}-workers-0-0.{job.name}:{PORT}",
        "JAXVLM_NUM_PROCESSES": str(job.machine.hosts),
    }
    env += [{"name": name, "value": value} for name, value in own.items()]
    return [
        *env,
        {"name": "JAXVLM_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
    ]


def _resource(job: Job) -> dict[str, int]:
    if job.gpus:
        return {"nvidia.com/gpu": job.gpus}
    chips = _devices_of_pod(job) // (2 if job.machine.name == "7x" else 1)
    return {"google.com/tpu": chips} if job.is_tpu else {}


def _devices_of_pod(job: Job) -> int:
    """Devices of a node: four chips of v5e or v6e in slices above 2x4.

    Source: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (``ct5lp-hightpu-4t``,
    ``ct6e-standard-4t``).
    """
    machine = job.machine
    is_large = machine.devices // machine.slices > 8
    return 4 if machine.name in ("v5e", "v6e") and is_large else machine.devices_per_host


def _selector(job: Job) -> dict[str, str]:
    machine = job.machine
    if job.is_tpu:
        return {_TPU_LABEL: TPUS[machine.name], _TOPOLOGY: machine.topology}
    if not job.gpus:
        return {}
    if machine.name not in GPUS:
        raise ConfigError(
            f"launch gke: GKE has no node with a {machine.name}; it has {', '.join(GPUS)}"
        )
    return {_GPU_LABEL: GPUS[machine.name]}
