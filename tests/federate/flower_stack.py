"""Flower's processes on this machine, with TLS and node keys; all can be killed and restarted."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import runs
import safetensors.numpy
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jaxvlm.federate.flower.app_folder import OFFLINE, flower_command

HERE = pathlib.Path(__file__).resolve().parent
PEM = serialization.Encoding.PEM
NO_PASSWORD = serialization.NoEncryption()


def write_certificates(folder: pathlib.Path) -> None:
    """A certificate of localhost, and the authority that signed it: ca.crt, server.crt, .key."""
    authority, own = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer = _name("test authority")
    marks = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    now = datetime.datetime.now(datetime.UTC)
    for name, subject, key, extension in (
        ("ca", issuer, authority, x509.BasicConstraints(ca=True, path_length=None)),
        ("server", _name("localhost"), own, x509.SubjectAlternativeName(here)),
    ):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=name == "ca")
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(marks, False)
            .sign(authority, hashes.SHA384())
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(PEM))
    kind = serialization.PrivateFormat.PKCS8
    (folder / "server.key").write_bytes(own.private_bytes(PEM, kind, NO_PASSWORD))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def write_key(path: pathlib.Path) -> None:
    """A node's key, as ssh-keygen writes it: ``path`` and ``path``.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    kind = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(PEM, kind, NO_PASSWORD))
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def environment(home: pathlib.Path | None = None) -> dict[str, str]:
    """Of our processes and of Flower's, whose files are below ``home``."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {} if home is None else {"FLWR_HOME": str(home)}
    env = runs.environment(devices=1, PATH=path, **OFFLINE, **more)
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(runs.compile_cache()))
    return env


def weights(folder: pathlib.Path, version: int) -> dict[str, np.ndarray]:
    """The parameters of a version in a coordinator's folder."""
    arrays = safetensors.numpy.load((folder / "versions" / f"{version}.safetensors").read_bytes())
    start = "params/"
    return {n.removeprefix(start): x for n, x in arrays.items() if n.startswith(start)}


class Stack:
    """The processes of a federation of two sites; as a context, all are killed at its end.

    Args:
        folder: for all their files; its path is short, as sockets' paths are.
        sites: name -> command of its process; {socket} and {folder} in it are the site's.
        config: the coordinator's recipe.
        more: further arguments of the coordinator.
    """

    def __init__(self, folder, sites, config=HERE / "flower_recipe.py", more=()):
        self.folder = folder
        port, *node_ports = free_ports(1 + len(sites))
        self.superlink, self.sites = f"127.0.0.1:{port}", sites
        write_certificates(folder)
        for site in sites:
            write_key(folder / f"{site}.key")
        coordinator = runs.command(
            "federate", "serve", f"--config={config}", f"--workdir={folder / 'coordinator'}",
            f"--superlink={self.superlink}", f"--root_certificates={folder / 'ca.crt'}",
            f"--socket={folder / 'sockets' / 'coordinator'}", "--wait_s=10", "--linger_s=3", *more,
        )  # fmt: skip
        self.commands = {
            "superlink": [
                flower_command("flower-superlink"), "--host=127.0.0.1", f"--port={port}",
                f"--database={folder / 'superlink.db'}", "--enable-supernode-auth",
                f"--ssl-ca-certfile={folder / 'ca.crt'}", f"--ssl-certfile={folder / 'server.crt'}",
                f"--ssl-keyfile={folder / 'server.key'}",
                "--disable-runtime-dependency-installation",
            ],
            "coordinator": coordinator,
        }  # fmt: skip
        for site, node_port in zip(sites, node_ports):
            node = shlex.join(self.node(site, node_port))
            self.commands[f"node {site}"] = ["bash", "-c", f"until {node}; do sleep 5; done"]
            values = {"socket": self.socket(site), "folder": folder / site}
            self.commands[f"site {site}"] = [str(x).format(**values) for x in sites[site]]
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.kill(name)
        for entry in pathlib.Path("/proc").glob("[0-9]*"):  # in process groups of their own
            with contextlib.suppress(OSError):
                if bytes(self.folder) in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    def socket(self, site):
        return self.folder / "sockets" / site

    def node(self, site, port, key="", root=""):
        """The command of a site's SuperNode."""
        return [
            flower_command("flower-supernode"), f"--superlink={self.superlink}",
            f"--root-certificates={root or self.folder / 'ca.crt'}", f"--port={port}",
            f"--auth-supernode-private-key={key or self.folder / f'{site}.key'}",
            "--node-config", f'socket="{self.socket(site)}"',
        ]  # fmt: skip

    def start(self, *names):
        """Start processes, each in a process group of its own; what they say is in files."""
        for name in names:
            home = self.folder / "home" / name.replace(" ", "-").replace("/", "-")
            home.mkdir(parents=True, exist_ok=True)
            env = environment(home)
            with self.said(name).open("a") as said:
                self.processes[name] = subprocess.Popen(
                    self.commands[name], env=env, stdout=said, stderr=said, start_new_session=True
                )

    def kill(self, name):
        """SIGKILL to a process and to all that it started."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self, name):
        self.kill(name)
        self.start(name)

    def register(self, site):
        """Tell the SuperLink a site's key, once both are there."""
        home = self.folder / "coordinator.flower" / "home"
        command = [flower_command("flwr"), "supernode", "register"]
        command += [str(self.folder / f"{site}.key.pub"), "federation"]
        for _ in range(60):
            done = subprocess.run(command, env=environment(home), capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(1)
        raise AssertionError(done.stdout + done.stderr)

    def begin(self):
        """Start everything."""
        self.start("superlink", "coordinator")
        for site in self.sites:
            self.register(site)
            self.start(f"node {site}", f"site {site}")

    def said(self, name):
        return self.folder / f"{name.replace(' ', '-').replace('/', '-')}.log"

    def version(self):
        """The coordinator's version; -1: none."""
        table = self.folder / "coordinator" / "table.json"
        return json.loads(table.read_text())["version"] if table.exists() else -1

    def wait(self, until, seconds=300.0):
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not until():
            ends = {name: process.poll() for name, process in self.processes.items()}
            ours = [code for name, code in ends.items() if name.startswith(("site", "coordinator"))]
            if time.monotonic() > end or any(ours):
                raise AssertionError(f"{ends}\n{self.everything()}")
            time.sleep(0.05)

    def finish(self, seconds=300.0):
        """Wait for the good end of coordinator and sites."""
        names = ["coordinator", *(f"site {site}" for site in self.sites)]
        self.wait(lambda: all(self.processes[x].poll() is not None for x in names), seconds)
        ends = {name: self.processes[name].returncode for name in names}
        assert not any(ends.values()), f"{ends}\n{self.everything()}"

    def everything(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {x.name}\n{x.read_text()[-3000:]}" for x in logs)

    def weights(self) -> dict[str, np.ndarray]:
        """The last version's parameters."""
        return weights(self.folder / "coordinator", self.version())
