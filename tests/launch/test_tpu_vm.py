"""launch/tpu_vm.sh runs up to the gcloud call, and both scripts say what they do."""

import shlex
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_help():
    for script in ("slurm.sbatch", "tpu_vm.sh"):
        done = run("bash", str(LAUNCH / script), "--help")
        assert done.returncode == 0
        assert "--workdir=" in done.stdout


def test_tpu_vm_calls_gcloud_on_all_hosts():
    script = str(LAUNCH / "tpu_vm.sh")
    options = ["--tpu=pod", "--zone=z", "--project=p", "--install=jaxvlm[tpu]", "--dry_run"]
    done = run("bash", script, *options, "--", "train", "--config=x.py:a b")
    words = shlex.split(done.stdout)
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert {"--worker=all", "--zone=z", "--project=p"} <= set(words)
    remote = next(word for word in words if word.startswith("--command="))
    assert remote.endswith(r"jaxvlm train --config=x.py:a\ b")
    assert "JAXVLM_DISTRIBUTED=auto" in remote


@pytest.mark.parametrize("arguments", [["--tpu=a"], ["--what"], ["--tpu=a", "--zone=z", "--"]])
def test_tpu_vm_refuses_what_is_incomplete(arguments):
    done = run("bash", str(LAUNCH / "tpu_vm.sh"), *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
