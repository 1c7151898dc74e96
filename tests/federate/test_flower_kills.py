"""Flower's real processes, with TLS and node keys: kills change no bit, and strangers nothing."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

import pytest
import runs
from federate import fake_sites
from federate.fake_sites import FakeSite
from federate.flower_stack import (
    HERE,
    Stack,
    environment,
    free_ports,
    weights,
    write_certificates,
    write_key,
)

from jaxvlm.federate.service import Service

pytestmark = pytest.mark.long
SITES = ("a", "b")
REAL = ("site-0", "site-1")


@pytest.fixture
def folder():
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="jf-") as name:
        yield pathlib.Path(name)


def fake(name, rounds):
    """Command of a site's process that trains nothing."""
    script = str(HERE / "flower_site.py")
    own = [name, "{socket}", "{folder}.safetensors", str(rounds), "0.5", "0"]
    return [sys.executable, script, *own]


def test_strangers_are_refused_by_name(folder):
    """A key that nobody registered, and a SuperLink with another authority's certificate."""
    with Stack(folder, {}) as stack:
        stack.start("superlink")
        stack.wait(lambda: "Uvicorn running" in stack.said("superlink").read_text())
        (folder / "other").mkdir()
        write_certificates(folder / "other")
        write_key(folder / "x.key")
        for root, why in (
            ("ca.crt", "Failed to activate SuperNode"),
            ("other/ca.crt", "CERTIFICATE_VERIFY_FAILED"),
        ):
            (port,) = free_ports(1)
            stack.commands[root] = stack.node("x", port, folder / "x.key", folder / root)
            stack.start(root)
            stack.wait(lambda root=root: stack.processes[root].poll() is not None)
            assert stack.processes[root].returncode == 1
            assert why in stack.said(root).read_text()
        assert "No SuperNode found with the given public key" in (
            stack.said("superlink").read_text()
        )


def test_kills_change_no_bit(folder, tmp_path):
    """Of a site, the coordinator, a SuperNode and the SuperLink, one after another."""
    service = Service(fake_sites.federation(sites=2, rounds=6), tmp_path, lambda line: None)
    fake_sites.run(service, [FakeSite(name, service.handle) for name in SITES])
    with Stack(folder, {name: fake(name, 6) for name in SITES}) as stack:
        stack.begin()
        kills = ("site a", "coordinator", "node b", "superlink")
        for version, name in enumerate(kills, 1):
            stack.wait(lambda version=version: stack.version() >= version)
            stack.restart(name)
        stack.finish()
        assert stack.version() == 6
        assert fake_sites.same(stack.weights(), service.state.params)


def test_real_sites_make_the_weights_of_a_simulation(folder, tmp_path):
    """Of sites that are simulated in one process; a site and the SuperLink are killed."""
    files = []
    for name in REAL:
        (tmp_path / name).mkdir()
        files.append(str(runs.write_data(tmp_path / name, images=24 if name == REAL[0] else 36)))
    config = f"{HERE / 'flower_recipe.py'}:{files[0]}"
    simulation = runs.command(
        "federate", "simulate", f"--config={config}", f"--workdir={tmp_path / 'simulation'}",
        f"--site_data={','.join(files)}",
    )  # fmt: skip
    done = subprocess.run(simulation, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tokenizer = tmp_path / "simulation" / "data" / "tokenizer"
    sites = {
        name: runs.command(
            "federate", "site", f"--config={HERE / 'flower_recipe.py'}:{file},{tokenizer}",
            "--workdir={folder}", f"--site={name}", "--socket={socket}",
        )
        for name, file in zip(REAL, files)
    }  # fmt: skip
    with Stack(folder, sites, config) as stack:
        stack.begin()
        stack.wait(lambda: stack.version() >= 1)
        stack.restart(f"site {REAL[1]}")
        stack.wait(lambda: stack.version() >= 2)
        stack.restart("superlink")
        stack.finish()
        expected = weights(tmp_path / "simulation" / "coordinator", 3)
        assert fake_sites.same(stack.weights(), expected)
