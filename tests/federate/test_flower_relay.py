"""Messages over Flower's apps, in one process: whatever is lost on the way comes again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from federate import fake_sites
from federate.fake_sites import FakeSite
from federate.flower_grid import FaultyGrid
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvlm.config import ConfigError
from jaxvlm.federate import messages, reception
from jaxvlm.federate.client import Stopped
from jaxvlm.federate.flower import client_app, records, server_app
from jaxvlm.federate.mailbox import Mailbox
from jaxvlm.federate.reception import Reception
from jaxvlm.federate.service import Service
from jaxvlm.federate.sockets import Frame, SocketError

SITES = {11: "a", 22: "b"}
FAULTS = ("none", "none", "lose", "lose reply", "delay", "repeat", "node restarts")
RESTARTS = ("relay", "coordinator", *SITES)
WAIT_S, LOST = 0.02, 8.0
"""Seconds for which a message waits at a site; steps after which it counts as lost."""


class Process:
    """A site's process: a thread that ends when its mailbox is closed."""

    def __init__(self, name):
        self.site = FakeSite(name, self.call)
        self.is_over = False
        self.begin()

    def call(self, data):
        return self.box.call(data)

    def begin(self):
        self.is_killed = False
        self.box = Mailbox(lambda: self.is_killed)
        self.site.start()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            while not self.site.turn():
                pass
            self.is_over = True
        except Stopped:
            pass

    def kill(self):
        self.is_killed = True
        with self.box._changed:
            self.box._changed.notify_all()
        self.thread.join()

    def reply(self, message):
        return client_app.reply(message, lambda frame, _: self.box.exchange(frame))


class Federation:
    """Two sites, a relay and a coordinator, each of which can be killed and started again."""

    def __init__(self, workdir, config, faults):
        self.workdir, self.config, self.now = workdir, config, 0.0
        self.processes = {node: Process(name) for node, name in SITES.items()}
        self.grid = FaultyGrid({n: p.reply for n, p in self.processes.items()}, faults)
        self.start_coordinator()
        self.start_relay()

    def start_coordinator(self):
        self.service = Service(self.config, self.workdir, lambda line: None)
        self.reception = Reception(self.service, 5.0, lambda: self.now, lambda line: None)

    def start_relay(self):
        def ask(frame):
            return self.reception.answer(frame)

        self.relay = server_app.Relay(self.grid, ask, WAIT_S, LOST, lambda: self.now)

    def restart(self, what):
        if what == "relay":
            self.start_relay()
        elif what == "coordinator":
            self.start_coordinator()
        else:
            self.processes[what].kill()
            self.processes[what].begin()

    def run(self, restarts):
        """Take steps until the coordinator ends the relay; ``restarts``: step -> what."""
        for step in range(2000):
            self.now += 1
            if what := restarts.get(step):
                self.restart(what)
            if not (self.relay.report() and self.relay.step()):
                return
        raise AssertionError("the federation does not end")

    def close(self):
        for process in self.processes.values():
            process.kill()


def without_flower(workdir, config):
    """The last version of a federation whose sites call the coordinator themselves."""
    service = Service(config, workdir, lambda line: None)
    fake_sites.run(service, [FakeSite(name, service.handle) for name in SITES.values()])
    return service.state


def with_flower(workdir, config, faults=(), restarts=None):
    run = Federation(workdir, config, faults)
    try:
        run.run(restarts or {})
    finally:
        run.close()
    return run


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    config = fake_sites.federation(sites=2, rounds=3)
    return config, without_flower(tmp_path_factory.mktemp("plain"), config)


def test_a_federation_over_flower_has_the_bits_of_one_without(tmp_path, expected):
    config, state = expected
    run = with_flower(tmp_path, config)
    assert all(process.is_over for process in run.processes.values())
    assert fake_sites.same(run.service.state.params, state.params)
    assert all(x.duplicates == 0 for x in run.service.state.sites.values())


@settings(max_examples=15, deadline=None)
@given(
    faults=st.lists(st.sampled_from(FAULTS), max_size=40),
    restarts=st.dictionaries(st.integers(0, 60), st.sampled_from(RESTARTS), max_size=4),
)
def test_no_fault_changes_the_weights(tmp_path_factory, expected, faults, restarts):
    config, state = expected
    run = with_flower(tmp_path_factory.mktemp("faults"), config, faults, restarts)
    assert run.service.state.version == state.version
    assert fake_sites.same(run.service.state.params, state.params)


def test_an_older_relay_is_stopped(tmp_path, expected):
    run = Federation(tmp_path, expected[0], ())
    try:
        old = run.relay
        assert old.report()
        run.start_relay()
        assert run.relay.report()
        assert not old.report() and not old.step()
        assert run.relay.report()
    finally:
        run.close()


def test_a_question_for_the_next_version_waits_at_the_coordinator(tmp_path, expected):
    """So that no process is started at a site to hear that the version is not there yet."""
    config, now = expected[0], [0.0]
    service = Service(config, tmp_path, lambda line: None)
    desk = Reception(service, 5.0, lambda: now[0])
    desk.answer(Frame({"relay": "r", "hello": True, "undelivered": 0}))
    names = iter(range(100))

    def call(data):
        head = {"relay": "r", "node": "1", "id": f"q{next(names)}"}
        answers.append(desk.answer(Frame(head, data)))
        return answers[-1].body or messages.pack("wait", {"version": 0, "poll_s": 0})

    answers = []
    a, b = FakeSite("a", call), FakeSite("b", service.handle)
    for site in (a, b, a, b, a):
        site.turn()
    assert answers[-1].head == {"later": True}
    question = Frame({"relay": "r", "node": "1", "id": "q-same"}, fetch(a))
    assert desk.answer(question).head == {"later": True}
    now[0] += reception.HOLD_S
    assert messages.unpack(desk.answer(question).body).kind == "wait"
    b.turn()
    assert messages.unpack(desk.answer(question._replace(head={**question.head, "id": "q"})).body)


def fetch(site):
    head = {"site": site.name, "session": site.client._session, "have": site.disk[0]}
    return messages.pack("fetch", head)


def test_a_request_that_comes_twice_has_the_same_answer(tmp_path, expected):
    """It would be judged as a duplicate, and a second join would end the first one's session."""
    service = Service(expected[0], tmp_path, lambda line: None)
    desk = Reception(service, 5.0)
    names = iter(range(100))

    def call(data):
        frame = Frame({"relay": "r", "node": "1", "id": f"q{next(names)}"}, data)
        first, second = desk.answer(frame), desk.answer(frame)
        assert first == second
        return first.body or messages.pack("wait", {"version": 0, "poll_s": 0})

    site = FakeSite("a", call)
    for _ in range(3):
        site.turn()
    assert site.verdicts == ["accepted"]
    assert service.state.sites["a"].duplicates == 0


def test_a_node_can_not_speak_for_another_ones_site(tmp_path, expected):
    """Nor for two; and a coordinator that starts again knows whose is whose."""
    said = []
    for _ in range(2):
        service = Service(expected[0], tmp_path, lambda line: None)
        desk = Reception(service, 5.0, log=said.append)
        desk.answer(Frame({"relay": "r", "hello": True, "undelivered": 0}))
        names = iter(range(100))

        def call(node, desk=desk, names=names):
            head = {"relay": "r", "node": node}
            return lambda data: desk.answer(Frame(head | {"id": f"{next(names)}"}, data)).body

        FakeSite("a", call("1")).turn()
        with pytest.raises(ConfigError, match="site a is not this node's"):
            FakeSite("a", call("2")).turn()
        with pytest.raises(ConfigError, match="node 1 has spoken for a"):
            FakeSite("b", call("1")).turn()
    assert set(service.state.sites) == {"a"} and len(said) == 4
    (tmp_path / "nodes.json").write_text("[1")
    with pytest.raises(ConfigError, match="is damaged"):
        Reception(service, 5.0)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_bytes_come_as_they_went(monkeypatch, size):
    monkeypatch.setattr(records, "PART", 300)
    frame = Frame({"id": "x", "wait_s": 1.5}, np.random.default_rng(0).bytes(size))
    assert records.unpack(records.pack(frame)) == frame


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"head": ConfigRecord({"frame": "{}", "parts": 0}), "body": ArrayRecord()},
        {"head": ConfigRecord({"frame": '{"id": 3}', "parts": 0}), "body": ArrayRecord()},
        {"head": ConfigRecord({"frame": '{"id": ""}', "parts": 1}), "body": ArrayRecord()},
        {"head": ConfigRecord({"frame": "[[", "parts": 0}), "body": ArrayRecord()},
    ],
)
def test_what_another_app_sends_is_refused(content):
    with pytest.raises(ValueError, match="no frame of jaxvlm"):
        records.unpack(RecordDict(content))


def test_a_node_that_sends_anything_else_stops_no_other(tmp_path, expected, capsys):
    config, state = expected
    run = Federation(tmp_path, config, ())
    run.grid.activated[33] = "0"
    run.grid.nodes[33] = lambda message: Message(RecordDict(), reply_to=message)
    try:
        run.run({})
    finally:
        run.close()
    assert fake_sites.same(run.service.state.params, state.params)
    assert "no frame of jaxvlm" in capsys.readouterr().out


@pytest.mark.parametrize("head", [{}, {"relay": ""}, {"relay": "r"}, {"relay": "r", "node": 1}])
def test_a_frame_of_no_relay_is_refused(tmp_path, expected, head):
    service = Service(expected[0], tmp_path, lambda line: None)
    with pytest.raises(SocketError):
        Reception(service, 5.0).answer(Frame(head))


@pytest.mark.parametrize("head", [{}, {"id": "", "wait_s": -1}, {"id": 1, "wait_s": 1}])
def test_a_frame_of_no_coordinator_is_refused(head):
    with pytest.raises(SocketError):
        Mailbox().exchange(Frame(head))
