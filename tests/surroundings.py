"""Runs tests where they could reach the machine, and tells what they touched of it.

``python tests/surroundings.py tests/launch`` copies the clone's files to a temporary folder and
runs these tests there with variables of schedulers, clouds and users set, their commands on PATH
(each only notes that it was called), and a home folder that can't be written; where root runs it,
also without a network and as another user, or without root's rights where Python is in root's home.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from isolation import COMMANDS

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 3600
"""Seconds."""
NOBODY = 65534
VARIABLES = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "8",
    "OMPI_COMM_WORLD_SIZE": "2",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.1",
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "tpu",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "CUDA_VISIBLE_DEVICES": "0",
    "https_proxy": "http://192.0.2.1:1",
    "HF_HOME": "/nowhere",
    "HF_TOKEN": "none",
    "WANDB_MODE": "online",
    "XDG_CACHE_HOME": "/nowhere",
    "PYTHONWARNINGS": "default",
    "PYTHONHASHSEED": "7",
}
"""What a user or a scheduler may have set, and no test may read."""


def command_that_notes(folder: pathlib.Path, notes: pathlib.Path) -> None:
    """Fill ``folder`` with the machine's commands, which write their names to ``notes``."""
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {notes}\n')
        (folder / name).chmod(0o755)


def copied(folder: pathlib.Path) -> None:
    """Copy the clone's files that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def unprivileged(*given: pathlib.Path) -> list[str]:
    """The command before a command that makes it run without root's rights.

    Args:
        given: files and folders that it may write.
    """
    nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    start = [
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run(sys.executable, input=b'')",
    ]
    if subprocess.run([*nobody, *start], capture_output=True).returncode:
        return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]  # its Python is root's alone
    for top in given:
        for path in (top, *top.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    return nobody


def main(tests: list[str]) -> int:
    """Run the tests; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="jaxvlm-surroundings-") as made:
        place = pathlib.Path(made)
        clone, home, notes = place / "clone", place / "home", place / "notes"
        for folder in (clone, home, place / "tmp"):
            folder.mkdir()
        notes.touch()
        command_that_notes(place / "commands", notes)
        copied(clone)
        place.chmod(0o755)
        home.chmod(0o555)
        command = [sys.executable, "-m", "pytest", *tests]
        if os.geteuid() == 0:
            command = [*unprivileged(clone, notes, place / "tmp"), *command]
            command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "", *command]
        env = os.environ | VARIABLES | {"HOME": str(home), "TMPDIR": str(place / "tmp")}
        env |= {"PYTHONPATH": str(clone), "PATH": f"{place / 'commands'}:{env['PATH']}"}
        status = subprocess.run(command, cwd=clone, env=env, timeout=LIMIT).returncode
        called = notes.read_text().splitlines()
        print("called:", *(called or ["nothing"]), sep="\n  ")
        print("written to the home folder:", *([p.name for p in home.iterdir()] or ["nothing"]))
        return status or bool(called)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
