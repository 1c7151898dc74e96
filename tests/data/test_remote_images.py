"""Images in a bucket, relative to their file or to ``data.image_root``: those that are there."""

import dataclasses
import io
import json
import os
import pathlib

import loopback_store
import numpy as np
import pytest
from loopback_store import answers, cut, flipped, short, unavailable
from PIL import Image

from jaxvlm.cli.main import run
from jaxvlm.config import Config, ConfigError, DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import conversation_formats, pair_formats, remote_images, tables
from jaxvlm.inference import items
from jaxvlm.stores import store_requests
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.trainer import checks

pytestmark = pytest.mark.parametrize("store", loopback_store.KINDS, indirect=True)
NAMES = ("a.png", "in/b.png", "in/deep er/c.png", "./in/d.png", "../beside/e.png", "../f.png")


@pytest.fixture(scope="module")
def store(request, tmp_path_factory):
    with loopback_store.of_kind(request.param, tmp_path_factory) as made:
        yield made


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    loopback_store.hurry(monkeypatch, store_requests)


def png(color):
    data = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(data, "PNG")
    return data.getvalue()


def colors():
    return {name: (10 * i, 0, 255 - i) for i, name in enumerate(NAMES)}


@pytest.fixture
def root(request, store):
    """The URL of a folder with records; there are images in it and next to it."""
    store.wrong.clear()
    url = f"{store.scheme}://runs/{abs(hash(request.node.name))}/set"
    for name, color in colors().items():
        RemoteFolder(url.removesuffix("/set")).write(
            f"set/{name}".replace("set/../", "").replace("/./", "/"), png(color)
        )
    rows = [{"id": n, "question": "which?", "answer": "it", "image": n} for n in NAMES]
    RemoteFolder(url).write("data.jsonl", "".join(json.dumps(x) + "\n" for x in rows).encode())
    yield url
    store.wrong.clear()


def read(spec, copies, **more):
    config = DataConfig(train=spec, download_dir=str(copies), **more)
    records, problems = conversation_formats.read(spec, config)
    assert not problems
    return {record.id: record.images[0] for record in records}


def assert_right(paths, of=None):
    for name, color in (of or colors()).items():
        pixels = np.asarray(Image.open(paths[name]))
        assert (pixels == color).all() and pathlib.Path(paths[name]).name == name.split("/")[-1]


def image_reads(store):
    how = "alt=media" if store.scheme == "gs" else ".png"
    return [x for x in store.seen if x.startswith("GET") and ".png" in x and how in x]


def test_images_are_copied_once_and_again_when_they_are_others(store, root, tmp_path):
    spec = f"{root}/data.jsonl"
    paths = read(spec, tmp_path)
    assert_right(paths)
    store.seen.clear()
    assert read(spec, tmp_path) == paths and not image_reads(store)
    RemoteFolder(root).write("in/b.png", png((1, 2, 3)))  # of the same size, perhaps
    again = read(spec, tmp_path)
    assert_right(again, colors() | {"in/b.png": (1, 2, 3)})
    assert_right(paths)  # another run still reads them
    assert {n for n in NAMES if again[n] != paths[n]} == {"in/b.png"}
    assert len(image_reads(store)) == 1


def test_files_on_this_machine_and_images_in_a_bucket(store, root, tmp_path):
    file = tmp_path / "here.jsonl"
    file.write_bytes(RemoteFolder(root).read("data.jsonl"))
    assert_right(read(str(file), tmp_path / "copies", image_root=root))
    url = f"{root}/data.jsonl"
    assert_right(read(url, tmp_path / "more", image_root=root))
    config = Config(data=DataConfig(train=url, image_root="gs:///x"))
    with pytest.raises(ConfigError, match=r"config.data.image_root=gs:///x: name a folder"):
        checks.check_data(config)
    data = dataclasses.replace(config.data, image_root="http://localhost/images")
    with pytest.raises(ConfigError, match="image_root=http://localhost/images: of object stores"):
        checks.check_data(dataclasses.replace(config, data=data))
    data = dataclasses.replace(config.data, image_root=f"{root.partition('://')[0]}://runs")
    checks.check_data(dataclasses.replace(config, data=data))


def test_what_is_not_there_is_a_missing_file(store, root, tmp_path):
    names = (
        "none.png",
        "in/none.png",
        "../../../out.png",
        "n" * 300 + ".png",
        "in",
        "a.png#1",
        "a.png?x",
        "/a.png",
    )
    rows = [{"question": "?", "answer": "it", "image": n, "id": n} for n in names]
    file = tmp_path / "here.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in rows))
    for name, path in read(str(file), tmp_path / "copies", image_root=root).items():
        assert image_files.check(path, 10**6) == "missing file", name
        assert path.startswith("/") and name.rpartition("/")[2] in path
        if name != "/a.png":
            assert os.path.realpath(path).startswith(str(tmp_path / "copies"))


def test_what_fails_for_a_while_changes_nothing(store, root, tmp_path):
    # Amazon's own library compares checksums, which Moto does not send.
    for how in (cut, short, unavailable, *([flipped] if store.scheme == "gs" else [])):
        rules = [answers(store.path(name), how, 2, ("GET",)) for name in ("a.png", "in/b.png")]
        store.wrong[:] = rules
        assert_right(read(f"{root}/data.jsonl", tmp_path / how.__name__))
        assert sum(rule[0] for rule in rules) < 4


def test_what_fails_for_good_is_named(store, root, tmp_path):
    store.wrong.append(answers("beside", unavailable, 10_000))
    with pytest.raises(StoreError, match="beside"):
        read(f"{root}/data.jsonl", tmp_path)


def test_many_are_copied_together(store, root, tmp_path, monkeypatch):
    """While records are read, neither one by one nor all at the end."""
    counts, each = [], remote_images.each

    def counted(call, paths):
        counts.append(len(paths))
        each(call, paths)

    monkeypatch.setattr(remote_images, "each", counted)
    monkeypatch.setattr(remote_images, "_AT_ONCE", 4)
    assert_right(read(f"{root}/data.jsonl", tmp_path))
    assert counts == [4, 2]
    assert not list(tmp_path.rglob("partial-*"))


def test_of_many_folders_all_is_listed_at_once(store, root, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_images, "_FOLDERS", 3)
    names = [f"f{i}/{i}.png" for i in range(9)]
    for name in names:
        RemoteFolder(root).write(name, png((7, 8, 9)))
    images = remote_images.RemoteImages(root, DataConfig(download_dir=str(tmp_path)))
    listed, files = [], RemoteFolder.files
    monkeypatch.setattr(
        RemoteFolder, "files", lambda self, folder: listed.append(folder) or files(self, folder)
    )
    paths = {name: str(images.path(name)) for name in names}
    images.copy()
    assert_right(paths, dict.fromkeys(names, (7, 8, 9)))
    assert len(listed) == 5  # four folders, then the root


def test_an_image_that_changes_or_goes_meanwhile_is_named(store, root, tmp_path):
    """Its place is that of the version that was listed."""
    for name, change, said in (
        ("a.png", lambda x: RemoteFolder(root).write(x, png((1, 1, 1))), "changed while|not those"),
        ("in/b.png", lambda x: RemoteFolder(root).remove(x), r"b.png is gone, and was there at"),
    ):
        images = remote_images.RemoteImages(root, DataConfig(download_dir=str(tmp_path)))
        path = images.path(name)
        change(name)
        with pytest.raises(StoreError, match=said):
            images.copy()
        assert not path.exists()


def test_a_damaged_list_is_asked_for_again(store, root, tmp_path):
    for how in (cut, short):
        rule = answers("prefix=", how, 2, ("GET",))
        store.wrong[:] = [rule]
        assert_right(read(f"{root}/data.jsonl", tmp_path / how.__name__))
        assert rule[0] < 2


def test_a_copy_that_was_damaged_is_made_again(store, root, tmp_path):
    paths = read(f"{root}/data.jsonl", tmp_path)
    pathlib.Path(paths["a.png"]).write_bytes(b"")
    assert_right(read(f"{root}/data.jsonl", tmp_path))


def test_formats_of_ones_own_and_buckets_that_are_not_there(store, root, tmp_path):
    rows = [(name, {"question": "?", "answer": "it", "image": name}) for name in NAMES]
    config = DataConfig(download_dir=str(tmp_path))
    raw = tables.raw_records(rows, f"{root}/data.own", config)
    assert_right({x.where: x.locate(x.fields["image"]) for x in raw})
    none = f"{store.scheme}://nobody-has-it/x"
    with pytest.raises(DataError, match="nobody-has-it: no such bucket"):
        remote_images.RemoteImages(none, config).path("a.png")


def test_data_check_refuses_what_is_no_place_of_images(store, root, tmp_path, capsys):
    file = tmp_path / "here.jsonl"
    file.write_bytes(RemoteFolder(root).read("data.jsonl"))
    for where in ("gs://", "GS://runs/x", "http://localhost/x", "nowhere"):
        assert run(["data", "check", str(file), f"--image_root={where}"]) == 2
        assert f"--image_root={where}" in capsys.readouterr().err.replace("'", "")


def test_pairs_and_items_to_embed(store, root, tmp_path):
    rows = [{"id": n, "query_image": n, "positive": "w"} for n in NAMES]
    RemoteFolder(root).write("pairs.jsonl", "".join(json.dumps(x) + "\n" for x in rows).encode())
    config = DataConfig(download_dir=str(tmp_path))
    examples, problems = pair_formats.read(f"{root}/pairs.jsonl", config)
    assert not problems
    assert_right({example.id: example.query.image for example in examples})
    RemoteFolder(root).write(
        "items.jsonl", "".join(json.dumps({"id": n, "image": n}) + "\n" for n in NAMES).encode()
    )
    found, names = items.read(f"{root}/items.jsonl", config)
    assert_right({name: item.image for name, item in zip(names, found, strict=True)})
