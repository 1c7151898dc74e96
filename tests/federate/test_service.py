"""The coordinator's service: who may join, what it refuses, and kills at any moment."""

import pathlib

import numpy as np
import pytest
from fake_sites import FIRST, FakeSite, facts, federation, run, same

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError, OuterConfig
from jaxvlm.federate import files, messages, status
from jaxvlm.federate.client import Client
from jaxvlm.federate.service import Service


def silent(line):
    """Takes lines for people."""


def served(folder, config=None, **more):
    return Service(config or federation(), folder, log=more.pop("log", silent), **more)


def finished(folder, config, dtype="float32", names="abc"):
    service = served(folder, config)
    sites = [FakeSite(name, service.handle, dtype) for name in names]
    run(service, sites)
    return service, sites


def test_a_federation_runs_to_its_end(tmp_path):
    service, sites = finished(tmp_path, federation())
    assert service.is_over and service.state.version == 4
    assert all(same(site.disk[1], service.state.params) for site in sites)
    found = status.read_status(tmp_path)
    assert found["version"] == found["rounds"] == 4 and len(found["versions"]) == 4
    assert [row["accepted"] for row in found["sites"]] == [4, 4, 4]
    assert "version 4 of 4" in status.as_text(found)
    # A version's bytes have those of the update that completed it, and only downloads come after.
    last, total = found["versions"][-1]["bytes"], {s["site"]: s for s in found["sites"]}
    for name, (sent, received) in last.items():
        later = total[name]["bytes_sent"] - sent  # asking for the last version
        assert 0 <= later < 3 * 400 and received < total[name]["bytes_received"]


def test_what_is_refused_counts_no_bytes(tmp_path):
    service = served(tmp_path)
    FakeSite("a", service.handle).turn()
    before = {name: list(count) for name, count in service.bytes.items()}
    for site in ("a", "stranger"):
        data = messages.pack("submit", {"site": site, "session": "of another"})
        assert messages.unpack(service.handle(data)).kind == "refused"
    assert service.bytes == before


DIFFERENT = {
    "model": ({"config.model.decoder.depth": 3}, "config.model.decoder.depth is 2 there and 3"),
    "parameters": ({"vision/w": "float32 [4, 7]"}, "another model"),
    "frozen": ({"vision": "ff"}, "frozen weights of vision differ"),
    "start": ({"vision": "ff"}, "first weights of"),
    "tokenizer": ({"files": "b"}, "tokenizer differs"),
    "images": ({"preparation": "64 crop"}, "64 squash.*64 crop"),
    "tokens": (
        {"dtype": "float32", "codec": "int8", "token_order": "", "version": 1},
        "codec: 'exact' there and 'int8' here",
    ),
}


@pytest.mark.parametrize("group", DIFFERENT)
def test_sites_that_differ_are_refused_by_name(tmp_path, group):
    service = served(tmp_path)
    FakeSite("a", service.handle).turn()
    changed, words = DIFFERENT[group]
    if group == "model":
        group, changed = "settings", facts("b").common["settings"] | changed
    with pytest.raises(ConfigError, match=f"site b can't join.*{words}"):
        Client("b", service.handle).join(facts("b", **{group: changed}), lambda: FIRST)
    assert sorted(service.state.sites) == ["a"]
    others = {"dtype": "bfloat16", "token_order": "morton", "version": 2}
    for name, value in others.items() if group == "tokens" else ():
        tokens = facts("b").common["tokens"] | {name: value}
        with pytest.raises(ConfigError, match=name):
            Client("b", service.handle).join(facts("b", tokens=tokens), lambda: FIRST)


def test_a_recipe_other_than_the_coordinators_is_refused(tmp_path):
    service = served(tmp_path, federation(rounds=7))
    other = facts("a", settings=facts("a").common["settings"] | {"config.outer.steps": 3})
    with pytest.raises(ConfigError, match=r"config.outer.steps is 100 at the coordinator and 3"):
        Client("a", service.handle).join(other, lambda: FIRST)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """An update that can't be written is not judged: sent again, it counts."""
    service = served(tmp_path, federation(sites=1))
    site = FakeSite("a", service.handle)
    site.turn()
    site.turn()
    save = service.folder.save_update

    def full(update):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(service.folder, "save_update", full)
    with pytest.raises(OSError):
        site.turn()
    monkeypatch.setattr(service.folder, "save_update", save)
    site.start()
    site.turn()
    site.turn()
    assert site.verdicts == ["accepted"] and service.state.version == 1
    assert served(tmp_path, federation(sites=1)).state.version == 1


def test_a_site_from_an_older_copy_loses_one_update(tmp_path):
    service = served(tmp_path, federation(sites=1, rounds=6))
    site = FakeSite("a", service.handle)
    for _ in range(3):
        site.turn()
    copy = site.disk
    for _ in range(2):
        site.turn()
    site.disk = copy
    site.start()
    run(service, [site])
    assert site.verdicts.count("duplicate") == 1 and service.state.version == 6


def test_after_the_deadline_an_update_is_late(tmp_path):
    now = [0.0]
    config = federation(sites=2, rounds=3, min_sites=1, deadline_s=5.0)
    service = served(tmp_path, config, clock=lambda: now[0])
    quick, slow = FakeSite("quick", service.handle), FakeSite("slow", service.handle)
    for site in (quick, slow, quick, slow, quick):
        site.turn()
    assert service.state.version == 0
    now[0] = 6.0
    slow.turn()
    assert slow.verdicts == ["late"] and service.state.version == 1
    assert status.read_status(tmp_path)["versions"][0]["left_out"] == ["slow"]


def test_platforms_may_differ_and_are_recorded(tmp_path):
    service = served(tmp_path)
    for name, platform in (("a", "cpu"), ("b", "tpu")):
        about = {"platform": platform, "jax": "0.12.0"}
        Client(name, service.handle).join(facts(name, about=about), lambda: FIRST)
    joined = [r for r in status.read_log(tmp_path) if r["event"] == "joined"]
    assert [r["about"]["platform"] for r in joined] == ["cpu", "tpu"]


def test_a_site_too_many_and_a_site_twice(tmp_path):
    service = served(tmp_path, federation(sites=1))
    first = FakeSite("a", service.handle)
    first.turn()
    with pytest.raises(ConfigError, match="has its 1 sites, a"):
        FakeSite("b", service.handle).turn()
    FakeSite("a", service.handle).turn()  # another process with its name
    with pytest.raises(ConfigError, match="another process with the same name"):
        first.turn()


def test_first_weights_are_those_that_are_described(tmp_path):
    service = served(tmp_path)
    wrong = {**FIRST, "decoder/b": FIRST["decoder/b"] + 1}
    with pytest.raises(ConfigError, match="not those that it described"):
        Client("a", service.handle).join(facts("a"), lambda: wrong)
    assert service.state is None


def test_strangers_bytes_change_nothing(tmp_path):
    service = served(tmp_path)
    site = FakeSite("a", service.handle)
    site.turn()
    before = service.state
    good = messages.pack("fetch", {"site": "a", "session": "x", "have": 0})
    draws = np.random.default_rng(0)
    strange = [b"", b"\0" * 8, b"GET / HTTP/1.1\r\n\r\n", good[:-3], good[:20]]
    strange += [draws.bytes(n) for n in (1, 9, 100, 5000)]
    strange += [messages.pack(kind, head) for kind, head in [
        ("shutdown", {"site": "a"}), ("fetch", {}), ("fetch", {"site": 7}), ("fetch", {"site": ""}),
        ("fetch", {"site": "\ud800"}),
        ("join", {"site": "b", "facts": {"site": "b"}}), ("join", {"site": "b", "facts": 3}),
        ("submit", {"site": "a", "session": "x"}), ("fetch", {"site": "nobody", "session": "x"}),
    ]]  # fmt: skip
    for data in strange:
        answer = messages.unpack(service.handle(data))
        assert answer.kind == "refused" and answer.head["why"]
    assert service.state is before


def test_a_changed_bit_of_an_update_is_found(tmp_path):
    service = served(tmp_path, federation(sites=1))
    site = FakeSite("a", service.handle)
    site.turn()
    site.turn()

    def flipped(data):
        if messages.unpack(data).kind != "submit":
            return service.handle(data)
        broken = bytearray(data)
        broken[-1] ^= 1
        return service.handle(bytes(broken))

    site.client._call = flipped
    with pytest.raises(ConfigError, match="digest differs"):
        site.turn()
    assert not service.state.buffer


def test_a_poisoned_site_is_named_and_left_out(tmp_path):
    lines = []
    service = served(tmp_path, federation(sites=2, rounds=2), log=lines.append)
    good, bad = FakeSite("good", service.handle), FakeSite("bad", service.handle)
    for site in (good, bad, good, bad):
        site.turn()
    bad.disk = (0, {p: np.full_like(x, np.nan) for p, x in FIRST.items()}, 0, None)
    bad.turn()
    assert bad.verdicts == ["bad"] and "update 1 of bad: bad: " in lines[-1]
    assert status.read_status(tmp_path)["sites"][0]["bad"] == 1


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    finished(tmp_path, federation(rounds=1))
    with pytest.raises(ConfigError, match=r"config.federate.rounds: 1 -> 2"):
        served(tmp_path, federation(rounds=2))
    with pytest.raises(ConfigError, match=r"config.outer.steps: 100 -> 7"):
        served(tmp_path, federation(rounds=1, outer=OuterConfig(steps=7)))


def test_a_coordinator_from_an_older_copy_is_found_out(tmp_path):
    service = served(tmp_path, federation(sites=1, rounds=3))
    site = FakeSite("a", service.handle)
    for _ in range(3):
        site.turn()
    assert site.disk[0] == 1
    service.state = service.state._replace(version=0)  # as in the folder before it
    with pytest.raises(ConfigError, match="restored from an older copy"):
        site.client.fetch(1)


@pytest.mark.parametrize("name", ["table.json", "federation.json", "versions"])
def test_damage_is_named(tmp_path, name):
    finished(tmp_path, federation(rounds=1))
    path = tmp_path / name
    path = next(path.glob("1.*")) if path.is_dir() else path
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=f"{path.name}.*damaged"):
        served(tmp_path, federation(rounds=1))


class Killed(BaseException):
    """The process is gone at this moment."""


class Moments:
    """Counts what a coordinator does to its disk and its sites, and kills it at one moment."""

    def __init__(self, monkeypatch):
        self.at, self.count = -1, 0
        whole, unlink = run_record.write_whole, pathlib.Path.unlink

        def write(path, data):
            self.pass_by()
            whole(path, data)
            self.pass_by()

        def remove(path, missing_ok=False):
            if path.suffix == ".safetensors":
                self.pass_by()
            unlink(path, missing_ok)

        monkeypatch.setattr(files.run_record, "write_whole", write)
        monkeypatch.setattr(pathlib.Path, "unlink", remove)

    def pass_by(self):
        self.count += 1
        if self.count == self.at:
            raise Killed

    def through(self, services):
        """A way to the newest coordinator, on which an answer may be lost."""

        def call(data):
            self.pass_by()
            answer = services[-1].handle(data)
            self.pass_by()
            return answer

        return call


@pytest.mark.parametrize("dtype, every", [("float32", 1), ("int8", 7)])
def test_killed_at_any_moment_nothing_is_lost(tmp_path, monkeypatch, dtype, every):
    """Coordinator or answer lost at each of all moments: the weights of the run without it."""
    config = federation(sites=2, rounds=2, outer=OuterConfig(delta_dtype=dtype))
    whole, _ = finished(tmp_path / "whole", config, dtype, "ab")
    moments = Moments(monkeypatch)
    for attempt in range(1, 400, every):
        folder = tmp_path / str(attempt)
        moments.at, moments.count = attempt, 0
        services = [served(folder, config)]
        sites = [FakeSite(n, moments.through(services), dtype) for n in "ab"]
        acknowledged, killed = dict.fromkeys("ab", 0), False
        for _ in range(200):
            site = sites[0]
            sites.append(sites.pop(0))
            try:
                if site.turn():
                    sites.remove(site)
            except Killed:
                killed, moments.at = True, -1
                services.append(served(folder, config))
                for other in sites:
                    other.start()
                records = services[-1].state.sites if services[-1].state else {}
                numbers = {name: record.number for name, record in records.items()}
                assert all(numbers.get(n, 0) >= number for n, number in acknowledged.items())
            if site.verdicts[-1:] == ["accepted"]:
                acknowledged[site.name] = max(acknowledged[site.name], site.sent)
            if not sites:
                break
        state = services[-1].state
        assert not sites and same(state.params, whole.state.params)
        assert [record.accepted for record in state.sites.values()] == [2, 2]
        if not killed:  # there is no such moment: all were tried
            assert attempt > 60
            return
    raise AssertionError("more moments than were expected")
