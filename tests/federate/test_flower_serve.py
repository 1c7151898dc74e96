"""The coordinator's and the sites' processes over sockets, with Flower's grid in this process."""

from __future__ import annotations

import io
import pathlib
import tempfile
import threading
import time
import zipfile

import pytest
from federate import fake_sites
from federate.fake_sites import FakeSite
from federate.flower_grid import FaultyGrid

from jaxvlm.cli import main
from jaxvlm.config import ConfigError
from jaxvlm.federate import sockets
from jaxvlm.federate.flower import app_folder, client_app, commands, serve, server_app
from jaxvlm.federate.flower.app_folder import FlowerApp
from jaxvlm.federate.mailbox import SiteSocket
from jaxvlm.federate.service import Service

SITES = {11: "a", 22: "b"}


@pytest.fixture
def folder():
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="jf-") as name:
        yield pathlib.Path(name)


def run_site(name, path):
    with SiteSocket(path) as mailbox:
        site = FakeSite(name, mailbox.call)
        while not site.turn():
            pass


def relay(folder):
    """What Flower runs for the coordinator."""

    def node(name):
        def ask(frame, timeout_s):
            return sockets.ask(folder / name, frame, timeout_s)

        return lambda message: client_app.reply(message, ask)

    def ask(frame):
        return sockets.ask(folder / "coordinator", frame, 30.0)

    grid = FaultyGrid({number: node(name) for number, name in SITES.items()})
    one = server_app.Relay(grid, ask, 0.05, 30.0)
    while one.report() and one.step():
        time.sleep(0.01)


def test_serve_starts_flowers_app_and_ends_when_all_have_the_last_version(
    folder, tmp_path, monkeypatch
):
    config = fake_sites.federation(sites=2, rounds=3)
    plain = Service(config, tmp_path / "plain", lambda line: None)
    fake_sites.run(plain, [FakeSite(name, plain.handle) for name in SITES.values()])
    monkeypatch.setattr(serve, "_SILENT_S", 0.2)
    monkeypatch.setattr(serve, "_TICK_S", 0.05)
    threads, starts = [], []

    def start():
        starts.append(time.monotonic())
        if len(starts) == 1:
            return False  # the SuperLink is not there yet
        threads.append(threading.Thread(target=relay, args=(folder,)))
        threads[-1].start()
        return True

    for name in SITES.values():
        threads.append(threading.Thread(target=run_site, args=(name, folder / name)))
        threads[-1].start()
    said = []
    service = serve.serve(config, tmp_path, folder / "coordinator", 0.3, start, log=said.append)
    for thread in threads:
        thread.join()
    assert len(starts) == 2
    assert fake_sites.same(service.state.params, plain.state.params)
    # Started again, it waits for sites that may have lost their last answer, and ends.
    monkeypatch.setattr(serve, "_AGAIN_S", 60.0)
    threads.clear()
    serve.serve(config, tmp_path, folder / "coordinator", 0.3, start, log=said.append)
    threads[0].join()
    assert "resuming at version 3 of 3, 0 updates wait" in said


def test_what_ends_the_coordinator_is_raised(folder, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Service, "handle", full)
    monkeypatch.setattr(serve, "_SILENT_S", 0.0)
    monkeypatch.setattr(serve, "_TICK_S", 0.05)
    head = {"relay": "r", "hello": True, "node": "1", "id": "x"}

    def start():
        with pytest.raises(sockets.CutOffError):
            sockets.ask(folder / "s", sockets.Frame(head, b"x"), 10.0)
        return True

    with pytest.raises(OSError, match="No space left"):
        serve.serve(
            fake_sites.federation(), tmp_path, folder / "s", 0.0, start, log=lambda line: None
        )


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flowers_app_is_a_folder_without_code(tmp_path):
    (tmp_path / "ca.crt").write_text("certificate")
    root = tmp_path / "ca.crt"
    app = FlowerApp(tmp_path / "flower", tmp_path / "s", 60.0, "host:9092", root)
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(app.app / "pyproject.toml")
    assert not warnings and config["project"]["dependencies"] == []
    assert config["tool"]["flwr"]["app"]["config"]["socket"] == str(tmp_path / "s")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app.app))) as fab:
        assert set(fab.namelist()) == {"pyproject.toml", ".info/CONTENT"}
    lines = commands.of_coordinator(app, "host:9092", root)
    assert "--host host --port 9092" in lines[0] and str(root) in lines[0]
    assert f'socket="{tmp_path / "s"}"' in commands.of_site(tmp_path / "s", tmp_path)[0]
    with pytest.raises(ConfigError, match="no such file"):
        FlowerApp(tmp_path / "flower", tmp_path / "s", 60.0, "host:9092", tmp_path / "none")
    for address in ("host", ":9092", "host:", "host:99999", "host:x", ""):
        with pytest.raises(ConfigError, match=r"--superlink=.*host and port"):
            FlowerApp(tmp_path / "flower", tmp_path / "s", 60.0, address, root)
    with pytest.raises(ConfigError, match="is not installed"):
        app_folder.flower_command("flower-none")


def test_a_superlink_that_is_not_there_is_said(tmp_path, capsys):
    (tmp_path / "ca.crt").write_text("certificate")
    app = FlowerApp(tmp_path / "flower", tmp_path / "s", 60.0, "127.0.0.1:9", tmp_path / "ca.crt")
    assert not app.start()
    assert capsys.readouterr().out.startswith("flwr run failed: ")
    assert not app.start()
    assert not capsys.readouterr().out, "the same line again"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["serve"], "needs --config, --workdir, --superlink, --root_certificates"),
        (["site"], "needs --config, --workdir, --site"),
        (["site", "--superlink=x"], "site takes no --superlink"),
        (["serve", "more"], "takes flags only"),
    ],
)
def test_flags_that_are_missing_or_of_another_verb_are_refused(args, why, capsys):
    assert main.run(["federate", *args]) == 2
    assert why in capsys.readouterr().err
