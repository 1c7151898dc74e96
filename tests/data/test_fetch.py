"""`jaxvlm data fetch` against a web server on loopback that is late, cut, refusing and lying."""

import http.server
import io
import json
import pathlib
import threading
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from jaxvlm.cli.main import run
from jaxvlm.config import DataConfig
from jaxvlm.data import fetch
from jaxvlm.data.pairs.examples import Example
from jaxvlm.data.sources import conversation_formats, fetched, pair_formats

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
        elif name == "reset":
            self.close_connection = True
        else:
            self.answer(200, png(int("".join(filter(str.isdigit, name)) or 0) % 256))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSES", (0.0, 0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
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
        ("file", "HTTP 302", 1),
        ("reset", "", 4),
        ("circle", "", 0),
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
    assert fetch._matches("b.org", "B.org.") and not fetch._matches("ab.org", "b.org")
    odd = ["http://", "http://[::1", "https:///x.png", "http://x\u0000y/"]
    assert set(get(tmp_path, *odd, limits=ANY._replace(hosts=("*",))).failed) == set(odd)


def test_names_beyond_ascii(server, tmp_path):
    url = f"{server}/kätzchen 5.png?q=über uns"
    assert get(tmp_path, url).new == 1
    (asked,) = Server.asked
    assert asked == "/k%C3%A4tzchen%205.png?q=%C3%BCber%20uns"


def test_a_killed_fetch_leaves_nothing_that_is_read(server, tmp_path, monkeypatch):
    import socket

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
    failed = [json.loads(x) for x in (tmp_path / "kept" / "failed.jsonl").open()]
    assert failed == [{"url": f"{server}/gone.png", "reason": "HTTP 404"}]
    config = DataConfig(train=str(file), fetched=str(tmp_path / "kept"))
    records, bad = conversation_formats.read(str(file), config)
    assert [x.reason for x in bad] == ["an image that was not fetched"]
    assert bad[0].detail == f"{server}/gone.png"
    for record, number in zip(records, (1, 1, 2), strict=False):
        assert pathlib.Path(record.images[0]).read_bytes() == png(number)
    assert records[3].images[0].endswith(".mp4::video")


def test_pairs_have_urls_too(server, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"query_image": f"{server}/{i}.png", "positive": f"number {i}"} for i in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert get(tmp_path / "kept", f"{server}/1.png").new == 1
    config = DataConfig(train=str(file), fetched=str(tmp_path / "kept"))
    examples, bad = pair_formats.read(str(file), config)
    assert [type(x) for x in examples] == [Example] and len(bad) == 1
    assert pathlib.Path(examples[0].query.image).read_bytes() == png(1)
