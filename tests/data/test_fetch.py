"""`jaxvlm data fetch` against a web server on loopback that is late, cut, refusing and lying."""

import contextlib
import dataclasses
import http.server
import io
import json
import os
import pathlib
import socket
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from jaxvlm.cli import data_fetch
from jaxvlm.cli.main import run
from jaxvlm.config import DataConfig, Extension, SourceConfig
from jaxvlm.data import fetch
from jaxvlm.data.pairs.examples import Example
from jaxvlm.data.sources import conversation_formats, fetched, pair_formats
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.sources.member_names import as_video

ANY = fetch.Limits(("127.0.0.1",), 2**16, timeout=5, workers=3)


def png(number):
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(out, "PNG")
    return out.getvalue()


class Server(http.server.BaseHTTPRequestHandler):
    """``/N.png`` is an image; other paths are answered as their names say."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[dict] = {}

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", kind="image/png", length=None, **headers):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if length != "none":
            self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if length is not None:
            self.close_connection = True

    def do_GET(self):
        path = self.path.partition("?")[0]
        count = self.asked[self.path] = self.asked.get(self.path, 0) + 1
        name = pathlib.PurePosixPath(path).stem
        again = {"busy": 503, "limited": 429, "gone": 404, "forbidden": 403}
        if name == "cut" and count < 3:
            self.answer(200, png(1)[:20], length=60)
        elif name in ("busy", "limited") and count < 3:
            self.answer(again[name], Retry_After="0")
        elif name in ("gone", "forbidden"):
            self.answer(again[name], b"no")
        elif name == "always":
            self.answer(500)
        elif name == "page":
            self.answer(200, b"<html>removed</html>", "text/html; charset=utf-8")
        elif name == "liar":
            self.answer(200, b"<html>removed</html>")
        elif name == "large":
            self.answer(200, bytes(2**16 + 1))
        elif name == "endless":
            self.answer(200, bytes(2**17), length="none")
        elif name == "moved":
            self.answer(302, Location="/7.png")
        elif name == "away":
            self.answer(302, Location="http://localhost:1/7.png")
        elif name == "file":
            self.answer(302, Location="file:///etc/hostname")
        elif name == "circle":
            self.answer(302, Location=self.path)
        elif name == "empty":
            self.answer(200)
        elif name == "half":
            self.answer(200, png(1)[:50], length="none")
        elif name == "nowhere":
            self.answer(302)
        elif name == "odd":
            self.answer(503, Retry_After="\u00b2")
        elif name == "flood":
            self.send_response(302)
            self.send_header("Location", "http://localhost:1/7.png")
            self.send_header("Content-Length", str(10**12))
            self.end_headers()
            self.close_connection = True
        elif name == "drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.02)
            self.close_connection = True
        elif name == "reset":
            self.close_connection = True
        else:
            self.answer(200, png(int("".join(filter(str.isdigit, name)) or 0) % 256))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSES", (0.0, 0.0, 0.0))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    Server.asked = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as own:
        threading.Thread(target=own.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{own.server_port}"
        own.shutdown()


def get(folder, *urls, limits=ANY, kind="an image"):
    return fetch.fetch(dict.fromkeys(urls, kind), folder, limits)


def test_files_are_kept_once_and_whole(server, tmp_path):
    urls = [f"{server}/{i}.png?size={i}" for i in range(40)]
    found = get(tmp_path, *urls, *urls[:3])
    assert found == (40, 0, {})
    for i, url in enumerate(urls):
        assert fetched.path_of(tmp_path, url).read_bytes() == png(i)
        assert fetched.path_of(tmp_path, url).suffix == ".png"
    assert get(tmp_path, *urls, f"{server}/99.png") == (1, 40, {})
    assert set(Server.asked.values()) == {1}
    assert not list(tmp_path.glob("partial-*"))


@pytest.mark.parametrize("name", ["cut", "busy", "limited", "moved"])
def test_what_fails_for_a_while_is_asked_for_again(server, tmp_path, name):
    url = f"{server}/{name}.png"
    assert get(tmp_path, url) == (1, 0, {})
    assert fetched.path_of(tmp_path, url).read_bytes() in (png(0), png(7))


@pytest.mark.parametrize(
    ("name", "reason", "asked"),
    [
        ("gone", "HTTP 404", 1),
        ("forbidden", "HTTP 403", 1),
        ("always", "HTTP 500", 4),
        ("page", "a web page, and not a file", 1),
        ("liar", "not an image", 1),
        ("large", "larger than --max_mb", 1),
        ("endless", "larger than --max_mb", 1),
        ("away", "localhost is not in --hosts", 1),
        ("file", "not an http:// or https:// URL", 1),
        ("reset", "", 4),
        ("circle", "sent on too often", 6),
        ("empty", "an empty file", 1),
        ("half", "truncated file", 1),
        ("nowhere", "HTTP 302", 1),
        ("odd", "HTTP 503", 4),
        ("flood", "localhost is not in --hosts", 1),
    ],
)
def test_what_fails_for_good_is_named_and_nothing_is_kept(server, tmp_path, name, reason, asked):
    url = f"{server}/{name}.png"
    found = get(tmp_path, url, f"{server}/3.png")
    assert found[:2] == (1, 0) and list(found.failed) == [url]
    assert found.failed[url] and reason in found.failed[url]
    assert Server.asked[f"/{name}.png"] == asked or not asked
    assert not fetched.path_of(tmp_path, url).exists()
    assert get(tmp_path, url).failed == found.failed  # it is asked for anew


def test_hosts_that_may_be_asked(server, tmp_path):
    one = f"{server}/1.png"
    for hosts, says in (
        ((), "127.0.0.1 is not in --hosts"),
        (("example.com",), "127.0.0.1 is not in --hosts"),
        (("*",), "127.0.0.1 has no public address"),
        (("*.0.0.1",), "127.0.0.1 has no public address"),
    ):
        found = get(tmp_path, one, limits=ANY._replace(hosts=hosts))
        assert says in found.failed[one]
    assert not Server.asked
    assert get(tmp_path, one, limits=ANY._replace(hosts=("*", "127.0.0.1"))).new == 1
    assert fetch._matches("a.b.org", "*.b.org") and not fetch._matches("b.org", "*.b.org")
    assert fetch._matches("b.org", "b.org") and not fetch._matches("ab.org", "b.org")
    assert get(tmp_path, f"{server}/2.png", limits=ANY._replace(hosts=("127.0.0.1.",))).new == 1
    odd = [
        *("http://", "http://[::1", "https:///x.png", "http://x\u0000y/", "http://a..b/x.png"),
        *(f"http://{'a' * 70}.org/", f"http://{'ä' * 70}.org/", "http://a.org/\ud800.png"),
        *("http://user:secret@a.org/", "http://a.org:x/", "http://a.org:99999/", "HTTP://:80/"),
    ]
    found = get(tmp_path, *odd, limits=ANY._replace(hosts=("*", "a.org")))
    assert set(found.failed) == set(odd)
    assert not any("secret" in reason for reason in found.failed.values())


@pytest.mark.parametrize(
    "variables",
    [{"no_proxy": "foo.example"}, {"https_proxy": "http://127.0.0.1:1"}],
    ids=lambda x: next(iter(x)),
)
def test_proxies_of_others_open_no_private_address(server, tmp_path, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    url = f"{server}/1.png"
    found = get(tmp_path, url, limits=ANY._replace(hosts=("*",)))
    assert "has no public address" in found.failed[url] and not Server.asked


def test_a_literal_private_address_is_not_asked_by_a_proxy(tmp_path, server, monkeypatch):
    monkeypatch.setenv("http_proxy", server)
    monkeypatch.setenv("no_proxy", "")
    urls = [f"http://{host}/1.png" for host in ("10.0.0.1", "[::1]", "169.254.169.254")]
    found = get(tmp_path, *urls, limits=ANY._replace(hosts=("*",)))
    assert all("has no public address" in found.failed[url] for url in urls)
    assert not Server.asked


def test_the_address_that_is_connected_to_is_checked(server, tmp_path, monkeypatch):
    """A name may have another address when it is asked for again."""
    make = socket.create_connection

    def to_this_machine(address, *args, **more):
        return make(("127.0.0.1", address[1]), *args, **more)

    monkeypatch.setattr(socket, "create_connection", to_this_machine)
    port = server.rpartition(":")[2]
    url = f"http://images.example.org:{port}/1.png"
    found = get(tmp_path, url, limits=ANY._replace(hosts=("*.example.org",)))
    assert "has no public address" in found.failed[url] and not Server.asked
    assert get(tmp_path, url, limits=ANY._replace(hosts=("images.example.org",))).new == 1


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("::1", False), ("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True),
        ("fe80::1%eth0", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("::127.0.0.1", False),
        ("224.0.0.1", False), ("100.64.0.1", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    try:
        fetch._refuse_private(address, "a")
    except fetch.Refused:
        assert not public
    else:
        assert public


def test_a_file_that_drips_has_a_deadline(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_DEADLINE", 0.2)
    found = get(tmp_path, f"{server}/drip.png")
    assert "not there after" in found.failed[f"{server}/drip.png"]
    assert Server.asked["/drip.png"] == 1


@pytest.mark.parametrize("name", ["empty", "page", "liar"])
def test_what_is_no_video(server, tmp_path, name):
    url = f"{server}/{name}.mp4"
    assert get(tmp_path, url, kind="a video").failed[url]


def test_an_error_ends_it_without_the_urls_that_wait(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        get(tmp_path, *(f"{server}/{i}.png" for i in range(500)))
    assert len(Server.asked) < 50


def test_names_beyond_ascii(server, tmp_path):
    url = f"{server}/kätzchen 5.png?q=über uns"
    assert get(tmp_path, url).new == 1
    (asked,) = Server.asked
    assert asked == "/k%C3%A4tzchen%205.png?q=%C3%BCber%20uns"


def test_a_killed_fetch_leaves_nothing_that_is_read(server, tmp_path, monkeypatch):
    left = tmp_path / f"partial-{socket.gethostname()}-999999999"
    other = tmp_path / "partial-another.host-1"
    for folder in (left, other):
        folder.mkdir()
        (folder / "x").write_bytes(b"half")
    monkeypatch.setattr(fetch.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        get(tmp_path, f"{server}/1.png")
    assert not left.exists() and other.exists()
    assert not fetched.path_of(tmp_path, f"{server}/1.png").exists()


def conversation(url, **more):
    return {"image": url, "question": "what?", "answer": "a cat"} | more


def test_from_records_to_a_check(server, tmp_path, capsys):
    """Conversations of several forms, the list of hosts, what failed, and `data check`."""
    part = {"type": "image_url", "image_url": {"url": f"{server}/2.png"}}
    said = [part, {"type": "text", "text": "and?"}]
    rows = [
        conversation(f"{server}/1.png"),
        conversation({"url": f"{server}/1.png"}),
        {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}]},
        conversation(f"{server}/gone.png"),
        conversation(f"{server}/clip.mp4") | {"image": None, "video": f"{server}/clip.mp4"},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, bad = conversation_formats.read(str(file))
    assert len(files) == 0 and {x.reason for x in bad} == {
        "an image that is not a file", "a video that is not a file"
    }  # fmt: skip
    output = f"--output={tmp_path / 'kept'}"
    assert run(["data", "fetch", str(file), output]) == 2
    shown = capsys.readouterr()
    assert "127.0.0.1" in shown.out and "--hosts=" in shown.err and not Server.asked
    flags = [output, "--hosts=127.0.0.1"]
    assert run(["data", "fetch", str(file), *flags]) == 1
    shown = capsys.readouterr().out
    assert "3 files fetched, 0 were there, 1 failed" in shown and "HTTP 404" in shown
    kept = [json.loads(x) for x in (tmp_path / "kept" / "kept.jsonl").open()]
    assert len(kept) == 3 and all((tmp_path / "kept" / x["file"]).is_file() for x in kept)
    failed = [json.loads(x) for x in (tmp_path / "kept" / "failed.jsonl").open()]
    assert failed == [{"url": f"{server}/gone.png", "reason": "HTTP 404"}]
    config = DataConfig(train=str(file), fetched=str(tmp_path / "kept"))
    records, bad = conversation_formats.read(str(file), config)
    assert [x.reason for x in bad] == ["an image that was not fetched"]
    assert bad[0].detail == f"{server}/gone.png"
    for record, number in zip(records, (1, 1, 2), strict=False):
        assert pathlib.Path(record.images[0]).read_bytes() == png(number)
    assert records[3].images[0].endswith(".mp4::video")


def own_records(file):
    turns = (Turn("user", "<image>what?"), Turn("assistant", "that"))
    return [Record("", turns, (file.removesuffix(".db"),))]


def test_a_video_of_a_format_of_the_users_own(server, tmp_path, capsys):
    url = f"{server}/clip.mp4"
    own = Extension(target=f"{__file__}:own_records")
    config = DataConfig(train=f"{as_video(url)}.db", fetched=str(tmp_path), format=own)
    asked = {}

    def file_of(*given):
        asked.update([given])
        return "kept"

    (record,), _ = conversation_formats.read(config.train, config, file_of)
    assert asked == {url: "a video"} and record.images == (as_video("kept"),)
    assert get(tmp_path, url, kind="a video").new == 1
    (record,), _ = conversation_formats.read(config.train, config)
    assert record.images == (as_video(str(fetched.path_of(tmp_path, url))),)


def test_sources_that_are_packed_have_no_urls(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "packed.json").write_text("{}")
    files = {"set": str(tmp_path / "set"), "file": str(tmp_path / "a.jsonl")}
    mixture = {name: SourceConfig(train=file) for name, file in files.items()}
    mixture["file"] = dataclasses.replace(mixture["file"], ignored_fields=("x",))
    config = DataConfig(mixture=mixture)
    for spec in ("", files["file"]):
        ((name, own),) = data_fetch._data(config, spec)
        assert name == files["file"] and own.ignored_fields == ("x",) and not own.mixture


def test_odd_spellings_of_urls(tmp_path):
    (tmp_path / "im 0.png").write_bytes(png(1))
    asked = []

    def file_of(url, article):
        asked.append(url)
        return "kept"

    names = {
        " http://a.org/1.png\n": "kept", "HTTP://a.org/1.png": "kept", "FILE:///b.png": "/b.png",
        f"file://{tmp_path}/im%200.png": f"{tmp_path}/im 0.png",
        f"file://{tmp_path}/im 0.png": f"{tmp_path}/im 0.png",
    }  # fmt: skip
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(conversation(name)) + "\n" for name in names))
    records, bad = conversation_formats.read(str(file), DataConfig(), file_of)
    assert not bad and [x.images[0] for x in records] == list(names.values())
    assert asked == ["http://a.org/1.png", "HTTP://a.org/1.png"]
    _, bad = conversation_formats.read(str(file))
    assert len(bad) == 2 and all("`jaxvlm data fetch` keeps it" in x.detail for x in bad)


@pytest.mark.parametrize("pattern", ["http://a.org", "a.org:80", "127.0.0.*", "*.", "a b", "u@a"])
def test_hosts_that_are_none(tmp_path, capsys, pattern):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(conversation("http://a.org/1.png")))
    assert run(["data", "fetch", str(file), f"--output={tmp_path}", f"--hosts={pattern}"]) == 2
    assert "name a host, *.NAME" in capsys.readouterr().err
    assert all(map(fetch.is_pattern, ("*", "*.a.org", "a.org", "127.0.0.1", "::1", "xn--a")))


def test_pairs_need_their_recipe(tmp_path, capsys):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"query_image": "http://a.org/1.png", "positive": "b"}))
    assert run(["data", "fetch", str(file), f"--output={tmp_path}", "--hosts=*"]) == 1
    assert "pairs are read with the --config of their recipe" in capsys.readouterr().out


def test_pairs_have_urls_too(server, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"query_image": f"{server}/{i}.png", "positive": f"number {i}"} for i in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert get(tmp_path / "kept", f"{server}/1.png").new == 1
    config = DataConfig(train=str(file), fetched=str(tmp_path / "kept"))
    examples, bad = pair_formats.read(str(file), config)
    assert [type(x) for x in examples] == [Example] and len(bad) == 1
    assert pathlib.Path(examples[0].query.image).read_bytes() == png(1)
