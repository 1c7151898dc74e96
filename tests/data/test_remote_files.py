"""Files of records at URLs: what is read is what is there, or it is an error."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.parse
from typing import ClassVar

import loopback_store
import pytest
from loopback_store import answers, cut, flipped, short, unavailable

from jaxvlm.config import Config, ConfigError, DataConfig
from jaxvlm.data.conversations.content import is_packed
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import remote_files
from jaxvlm.data.sources.conversation_formats import read
from jaxvlm.stores import store_requests
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.trainer import checks

ALL = pytest.mark.parametrize("store", loopback_store.READ_KINDS, indirect=True)


@pytest.fixture(scope="module")
def store(request, tmp_path_factory):
    with loopback_store.of_kind(request.param, tmp_path_factory) as made:
        yield made


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    loopback_store.hurry(monkeypatch, store_requests)


def lines(first, count=5):
    rows = [{"question": f"{i}?", "answer": f"{i}"} for i in range(first, first + count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def folder(request, store):
    """The URL of a folder with three files of records, and one of something else."""
    store.wrong.clear()
    name = f"d{abs(hash(request.node.name))}"
    files = {f"a{i}.jsonl": lines(10 * i) for i in range(3)} | {"notes.txt": b"hi"}
    if store.scheme == "http":
        (store.folder / name).mkdir(parents=True)
        for file, data in files.items():
            (store.folder / name / file).write_bytes(data)
        url = f"{store.url}/{name}"
    else:
        url = f"{store.scheme}://runs/{name}"
        for file, data in files.items():
            RemoteFolder(url).write(file, data)
    yield url
    store.wrong.clear()


def put(store, url, name, data):
    if store.scheme == "http":
        path = store.folder / url.rpartition("/")[2] / name
        path.write_bytes(data)
        os.utime(path, (1, 1))
    else:
        RemoteFolder(url).write(name, data)


def asked(spec, copies):
    records, problems = read(spec, DataConfig(train=spec, download_dir=str(copies)))
    assert not problems
    return [record.turns[-1].content for record in records]


@ALL
def test_a_file_is_copied_once_and_again_when_it_is_another(store, folder, tmp_path):
    spec = f"{folder}/a1.jsonl"
    assert not is_packed(spec, DataConfig()) and is_packed(folder, DataConfig())
    assert asked(spec, tmp_path) == [f"{i}" for i in range(10, 15)]
    store.seen.clear()
    assert asked(spec, tmp_path) == [f"{i}" for i in range(10, 15)]
    media = "alt=media" if store.scheme == "gs" else "a1.jsonl"
    copied = [x for x in store.seen if x.startswith("GET") and media in x]
    assert bool(copied) == (store.scheme == "http")  # it says no version of what it has
    put(store, folder, "a1.jsonl", lines(70))  # of the same size
    assert asked(spec, tmp_path) == [f"{i}" for i in range(70, 75)]
    with pytest.raises(DataError, match=r"a9\.jsonl: no such file there"):
        asked(f"{folder}/a9.jsonl", tmp_path)


@ALL
def test_a_file_without_a_folder(store, folder, tmp_path):
    root = store.url if store.scheme == "http" else f"{store.scheme}://runs"
    if store.scheme == "http":
        (store.folder / "root.jsonl").write_bytes(lines(30))
    else:
        RemoteFolder(root).write("root.jsonl", lines(30))
    assert asked(f"{root}/root.jsonl", tmp_path) == [f"{i}" for i in range(30, 35)]


@pytest.mark.parametrize("store", ["gs", "s3"], indirect=True)
def test_patterns(store, folder, tmp_path):
    assert asked(f"{folder}/a[02].jsonl", tmp_path) == [
        *(f"{i}" for i in range(5)), *(f"{i}" for i in range(20, 25))
    ]  # fmt: skip
    assert len(asked(f"{folder}/*.jsonl", tmp_path)) == 15
    with pytest.raises(DataError, match=r"no such file there; name a file, or a pattern"):
        asked(f"{folder}/b*.jsonl", tmp_path)


@ALL
@pytest.mark.parametrize("how", [cut, short, unavailable])
def test_what_fails_for_a_while_changes_nothing(store, folder, tmp_path, how):
    rule = answers("a0.jsonl", how, 2, ("GET",))
    store.wrong.append(rule)
    assert asked(f"{folder}/a0.jsonl", tmp_path) == [f"{i}" for i in range(5)]
    assert rule[0] < 2


@ALL
def test_what_is_wrong_for_good_is_no_data(store, folder, tmp_path):
    for how in (short, unavailable, *([flipped] if store.scheme != "http" else [])):
        store.wrong[:] = [answers("a0.jsonl", how, 10**6, ("GET",))]
        with pytest.raises(StoreError, match=r"a0\.jsonl"):
            asked(f"{folder}/a0.jsonl", tmp_path)
        assert not list(tmp_path.rglob("a0.jsonl"))
    store.wrong.clear()
    assert len(asked(f"{folder}/a0.jsonl", tmp_path)) == 5


def test_names_of_the_web():
    for url, name in (
        ("http://a.org/b/c.jsonl?download=true", "c.jsonl"),
        ("https://a.org/c.parquet", "c.parquet"),
        ("gs://b/x.json.gz", "x.json.gz"),
    ):
        assert remote_files.is_files(url) and remote_files._name(url) == name
    for url in ("http://a.org/set", "gs://b/set", "file:///a/b.jsonl", "b.jsonl", "s3://b/set/"):
        assert not remote_files.is_files(url)
    assert remote_files.is_files("gs://b/part-*") and remote_files.is_files("hf://datasets/a/b")


def test_a_run_may_name_them():
    data = DataConfig(train="gs://b/a.jsonl", eval="s3://b/c.parquet", download_dir="x")
    checks.check_data(Config(data=data))
    with pytest.raises(ConfigError, match=r"data\.eval='gs://b/set' is at a URL"):
        checks.check_data(Config(data=DataConfig(train="gs://b/a.jsonl", eval="gs://b/set")))


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub's client asks of it, of one data set."""

    protocol_version = "HTTP/1.1"
    commit = "0123456789abcdef0123456789abcdef01234567"
    files: ClassVar[dict] = {
        **{f"data/train-{i}.jsonl": lines(10 * i) for i in range(2)},
        "README.md": b"hi",
    }

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        status, body, more = 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/api/datasets/own/set/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
            status, body, more = 200, json.dumps(rows).encode(), {}
        elif path.startswith("/api/datasets/own/set"):
            siblings = [{"rfilename": name} for name in self.files]
            found = {"id": "own/set", "sha": self.commit, "siblings": siblings}
            status, body, more = 200, json.dumps(found).encode(), {}
        elif path.startswith("/datasets/own/set/resolve/"):
            name = path.split("/", 6)[6]
            body = self.files[name]
            status, more = 200, {"ETag": f'"{name}"', "X-Repo-Commit": self.commit}
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_files_of_the_hub(tmp_path):
    """By the hub's own client, from a hub of one data set on loopback; then without it."""
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    env |= {
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "JAX_PLATFORMS": "cpu",
    }

    def check(spec):
        command = [sys.executable, "-m", "jaxvlm", "data", "check", spec]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        return done.returncode, done.stdout + done.stderr

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        code, said = check("hf://datasets/own/set/data/train-*.jsonl")
        assert code == 0 and "10 of 10 records are good" in said, said
        code, said = check("hf://datasets/own/set")
        assert code != 0 and "it has data/train-0.jsonl, data/train-1.jsonl" in said
        code, said = check("hf://datasets/own/other/a.jsonl")
        assert code != 0 and "can't be downloaded from the hub" in said
        assert "Traceback" not in said
        server.shutdown()
    code, said = check("hf://datasets/own/set/data/train-1.jsonl")
    assert code == 0 and "5 of 5 records are good" in said, said
    assert pathlib.Path(tmp_path).is_dir()
