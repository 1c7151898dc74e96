"""Cloud TPU VMs: a command on every host of a slice that runs, or a queued resource to come."""

from __future__ import annotations

import shlex

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import FILE, STOPPED, Job, Rendered, exports, needs, restarting, setup

TYPES = {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1),
         "7x": ("tpu7x", 1)}  # fmt: skip
"""Machine -> name of its accelerator type, and what is counted in it: cores (2 a chip), or chips
(JAX devices of 7x). Source: cloud.google.com/tpu/docs, one page for each kind."""
RUNTIMES = {"v4": "tpu-ubuntu2204-base", "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5",
            "v6e": "v2-alpha-tpuv6e", "7x": "v2-alpha-tpu7-ubuntu2404"}  # fmt: skip
"""Machine -> software version. Source: cloud.google.com/tpu/docs/runtimes"""


def accelerator_type(job: Job) -> str:
    """Return the accelerator type of a slice, such as ``v5litepod-16``."""
    kind, size = TYPES[job.machine.name]
    return f"{kind}-{job.machine.devices // job.machine.slices * size}"


def _check(job: Job, target: str) -> None:
    if not job.is_tpu:
        raise ConfigError(f"launch {target} takes TPUs, such as --devices=v5e:16")


def render_running(
    job: Job, tpu: str = "", zone: str = "", project: str = "", install: str = ""
) -> Rendered:
    """Write a script of what each host of a running slice does; ``gcloud`` runs it on all.

    Args:
        job: to run.
        tpu: name of the TPU VM.
        zone, project: of it; project "": gcloud's own.
        install: what ``pip install`` is given first; "": nothing.

    Raises:
        ConfigError: a flag is missing, or the machine has several slices.
    """
    _check(job, "tpu")
    needs("tpu", tpu, "tpu", "my-v5e-16")
    needs("zone", zone, "tpu", "us-central1-a")
    if job.machine.slices > 1:
        raise ConfigError("launch tpu takes one slice; several are for launch queued, gke or xpk")
    script = (
        "#!/bin/bash\n"
        "# Runs on every host of the slice; the same command resumes the run.\n"
        "set -u\n"
        "export JAXVLM_DISTRIBUTED=auto\n"
        + exports(job, stopped=False)
        + setup(install)
        + f"exec {job.line}\n"
    )
    call = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu, f"--zone={zone}", "--worker=all"]
    call += [f"--project={project}"] if project else []
    return Rendered({f"{job.name}.sh": script}, (*call, f"--command={script}"))


def _login(image: str) -> str:
    """Lets the host's docker read an image of Google's registries."""
    host = image.partition("/")[0]
    if not host.endswith(("pkg.dev", "gcr.io")):
        return ""
    return f"gcloud auth configure-docker {shlex.quote(host)} --quiet || exit 2\n"


def render_queued(
    job: Job,
    zone: str = "",
    project: str = "",
    install: str = "",
    spot: bool = False,
    runtime: str = "",
) -> Rendered:
    """Write a startup script, and ask for slices that run it when they come.

    Args:
        job: to run; with an image, in its container.
        zone, project: where; project "": gcloud's own.
        install: what ``pip install`` is given, where there is no image.
        spot: whether slices may be taken back.
        runtime: software version of the VMs; "": that of the kind.

    Raises:
        ConfigError: a flag is missing.
    """
    _check(job, "queued")
    needs("zone", zone, "queued", "us-central1-a")
    if not (job.image or install):
        raise ConfigError(
            "launch queued needs what the hosts are to run: --image=IMAGE, or "
            "--install='jaxvlm[tpu]'"
        )
    environment = (("JAXVLM_DISTRIBUTED", "auto"), *job.environment)
    job = job._replace(environment=environment)
    line, before = job.line, setup(install)
    if job.image:
        before = _login(job.image)
        flags = " ".join(f"--env {name}" for name, _ in (*environment, STOPPED))
        line = f"docker run --rm --privileged --net=host --volume /mnt:/mnt {flags} "
        line += f"{shlex.quote(job.image)} {job.line}"
    script = (
        "#!/bin/bash\n"
        "# Runs on every host when the slices have come, and again after a restart of the host.\n"
        "set -u\n" + exports(job) + before + restarting(job, line)
    )
    machine, name = job.machine, f"{job.name}-startup.sh"
    call = ["gcloud", "compute", "tpus", "queued-resources", "create", job.name, f"--zone={zone}"]
    call += [f"--project={project}"] if project else []
    call += [
        f"--accelerator-type={accelerator_type(job)}",
        f"--runtime-version={runtime or RUNTIMES[machine.name]}",
    ]
    slices = [f"--node-count={machine.slices}", f"--node-prefix={job.name}"]
    call += slices if machine.slices > 1 else [f"--node-id={job.name}"]
    call += ["--spot"] if spot else []
    call += [f"--metadata-from-file=startup-script={FILE}"]
    note = (
        f"to see when it comes: gcloud compute tpus queued-resources describe {job.name} "
        f"--zone={zone}; what it prints: sudo journalctl -u google-startup-scripts on a host"
    )
    return Rendered({name: script}, tuple(call), note)
