"""Files and checkpoints in an object store whose answers are late, short, wrong or missing."""

import concurrent.futures
import contextlib
import os
import random
import subprocess
import sys
import time
import urllib.request
from urllib.parse import quote, unquote

import botocore.exceptions
import jax
import jax.numpy as jnp
import pytest
import s3fs.errors
from etils import epath
from loopback_store import answers, both, flipped, on_s3, short, unavailable
from remote_checkpoints import newest, saved, state

from jaxvlm.checkpoint import run_record
from jaxvlm.checkpoint.checkpointer import Checkpointer
from jaxvlm.config import ConfigError
from jaxvlm.stores import object_store, store_requests
from jaxvlm.stores.errors import StoreError
from jaxvlm.stores.object_store import RemoteFolder
from jaxvlm.trainer import run_files


def boto(status, code=""):
    """An error as s3fs raises it."""
    answer = {
        "ResponseMetadata": {"HTTPStatusCode": status},
        "Error": {"Code": code or str(status), "Message": "no words"},
    }
    return s3fs.errors.translate_boto_error(botocore.exceptions.ClientError(answer, "HeadObject"))


PROGRAM = """
import sys, jax.numpy as jnp
from jaxvlm.checkpoint.checkpointer import Checkpointer
with Checkpointer(sys.argv[1], int(sys.argv[2]), "", "max") as checkpointer:
    found = checkpointer.restore({"w": jnp.zeros(60_000), "b": jnp.zeros(7)})
    step = found.step if found else 0
    print("from", step, flush=True)
    while True:
        step += 1
        state = {"w": jnp.full(60_000, float(step)), "b": jnp.full(7, float(step))}
        checkpointer.save(step, state, {})
        checkpointer.wait()
        print(step, flush=True)
"""


@both
def test_files_are_read_written_created_once_and_moved(url):
    files = RemoteFolder(url)
    assert files.files() == {} and files.names("") == []
    files.write("a/x.json", b"1")
    files.write("config.json", b"{}")
    assert set(files.files()) == {"a/x.json", "config.json"} and files.names("") == [
        "a", "config.json",
    ]  # fmt: skip
    assert set(files.files(without=["a"])) == {"config.json"}
    assert files.create("b/1", b"me") and not files.create("b/1", b"you")
    assert files.create("b/1", b"me")  # an answer that was lost
    files.move("b", "c")
    assert set(files.files("c")) == {"c/1"} and not files.exists("b/1")
    files.remove("c/1")
    files.remove("c/1")
    with pytest.raises(FileNotFoundError):
        files.read("c/1")


def test_gcsfs_asks_nothing_by_grpc_wherever_it_was_imported_first(monkeypatch):
    import fsspec
    from gcsfs import core, extended_gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    for name in ("gs", "gcs"):
        other = extended_gcsfs.ExtendedGcsFileSystem
        fsspec.register_implementation(name, other, clobber=True)
    assert type(object_store._filesystem("gs")) is core.GCSFileSystem
    assert fsspec.get_filesystem_class("gcs") is core.GCSFileSystem


@both
def test_a_store_that_does_not_answer_has_no_missing_files(store, url, hasty):
    saved(url, 1, 2)
    store.wrong.append(answers("commit_success", unavailable, times=10_000))
    for asks in (
        lambda: RemoteFolder(url).exists("2/commit_success.txt"),
        lambda: run_record.committed_steps(epath.Path(url)),
        lambda: saved(url, 3),
    ):
        with pytest.raises(StoreError):
            asks()


@both
def test_marks_of_folders_are_no_files(store, url):
    """As consoles and gcsfuse write them: an object whose name ends with a slash."""
    path, method = url.removeprefix(f"{store.scheme}://runs/"), "POST"
    for name in (f"{path}/", f"{path}/checkpoints/"):
        where = f"{store.url}/upload/storage/v1/b/runs/o?uploadType=media&name={quote(name, '')}"
        if store.scheme == "s3":
            where, method = f"{store.url}/runs/{name}", "PUT"
        urllib.request.urlopen(urllib.request.Request(where, b"", method=method))
    RemoteFolder(url).write("config.json", b"{}")
    assert set(RemoteFolder(url).files()) == {"config.json"}


@pytest.mark.parametrize(
    "error, passes, refuses",
    [
        (ValueError("record: the checksum differs"), False, False),
        (ValueError("the bits of params/connector/w are not as written"), False, False),
        (ValueError("gs://b/checkpoints/503/state: bad header"), False, False),
        (ValueError("UNAVAILABLE: ... in gs://b/x"), True, False),
        (ValueError("DATA_LOSS: ..."), False, False),
        (ValueError("PERMISSION_DENIED: ..."), False, True),
        (PermissionError("no"), False, True),
        (TimeoutError(), True, False),
        (ConnectionResetError(), True, False),
        (FileNotFoundError("503"), False, False),
        (boto(500), True, False),
        (boto(502), True, False),
        (boto(429), True, False),
        (boto(409, "ConditionalRequestConflict"), True, False),
        (boto(409, "BucketNotEmpty"), False, False),
        (boto(400, "ExpiredToken"), False, True),
        (boto(403), False, True),
        (boto(412, "PreconditionFailed"), False, False),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), True, False),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), True, False),
        (botocore.exceptions.NoCredentialsError(), False, True),
        (botocore.exceptions.ProfileNotFound(profile="x"), False, True),
        (botocore.exceptions.PartialCredentialsError(provider="x", cred_var="y"), False, True),
        (botocore.exceptions.UnauthorizedSSOTokenError(), False, True),
        (botocore.exceptions.ParamValidationError(report="x"), False, False),
    ],
)
def test_silence_refusal_and_damage_are_told_apart(error, passes, refuses):
    assert (store_requests.passes(error), store_requests.refuses(error)) == (passes, refuses)


@both
def test_one_of_eight_creates_a_file(url):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i in range(5):
            made = list(
                pool.map(lambda who, i=i: RemoteFolder(url).create(f"x{i}", b"%d" % who), range(8))
            )
            assert sum(made) == 1


@both
def test_a_failure_that_passes_is_waited_for_and_one_that_lasts_is_named(store, url, hasty):
    files = RemoteFolder(url)
    files.write("x", b"12345678")
    store.wrong.append(answers(store.path("/x"), unavailable, times=8))
    assert files.read("x") == b"12345678"
    # Short with a length that agrees; Amazon's checksums are compared by its own library.
    for change in (short, flipped) if store.scheme == "gs" else (short,):
        store.wrong.append(answers(store.path("/x"), change))
        assert files.read("x") == b"12345678"
    store.wrong.append(answers(store.path("/x"), unavailable, times=10_000))
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"/x is read: the store has not done it for 2 s") as told:
        files.read("x")
    assert time.monotonic() - begun < 20 and told.value.passes


@both
def test_what_fails_for_good_is_not_tried_again(store, url, hasty):
    RemoteFolder(url).write("x", b"1")
    store.wrong.append(answers(store.path("/x"), lambda *_: (403, b"{}"), times=100))
    store.seen.clear()
    with pytest.raises(StoreError, match=r"the store refuses .* credentials") as told:
        RemoteFolder(url).read("x")
    assert not told.value.passes
    assert sum(store.path("/x") in line for line in store.seen) <= 2


@pytest.mark.parametrize(
    "folder, why",
    [
        ("az://b/run", "gs://BUCKET/FOLDER"),
        ("S3://b/run", "s3://BUCKET/FOLDER"),
        ("memory://x", "gs://BUCKET/FOLDER"),
        ("gs://", "name a folder in a bucket"),
        ("s3://b", "name a folder in a bucket: s3://BUCKET/FOLDER"),
        ("s3://b//x", "an empty name between two slashes"),
        ("gs://b/x//y", "an empty name between two slashes"),
        ("gs://b/../y", "or one of dots"),
        ("gs://b/o dd#1", "the character '#'"),
        ("gs://b/q?v=1/x", r"the character '\?'"),
        ("s3://b/a*", r"the character '\*'"),
        ("s3:/b/x", "give the URL of an object store with ://"),
    ],
)
def test_what_is_no_folder_of_a_store_is_refused_by_name(folder, why):
    with pytest.raises(ConfigError, match=why):
        run_files.folder_of(folder)


def killed_at_random(store, url, keep, rounds):
    rng, committed = random.Random(keep), 0
    for _ in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(keep)], stdout=subprocess.PIPE, text=True,
            env=os.environ | store.env | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert int(process.stdout.readline().split()[1]) >= committed
            for _ in range(rng.randint(1, 3)):
                committed = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.6))
            process.kill()
        assert newest(url) >= committed


@both
def test_a_kill_while_one_is_written_or_deleted_loses_nothing(store, url):
    killed_at_random(store, url, keep=1, rounds=2)


@both
@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 3])
def test_no_kill_of_many_loses_anything(store, url, keep):
    killed_at_random(store, url, keep, rounds=7)


@both
def test_the_mark_of_a_checkpoint_goes_before_its_files(store, url):
    store.seen.clear()
    saved(url, 1, 2, keep=1)
    gone = [unquote(line) for line in store.seen if line.startswith("DELETE")]
    gone = [line.partition("/1/")[2].partition("?")[0] for line in gone]
    if store.scheme == "gs":
        assert gone.index("commit_success.txt") < gone.index("record/metadata")
    else:  # the others with one request
        assert gone == ["commit_success.txt"]
        [all_others] = [i for i, line in enumerate(store.seen) if line.endswith("?delete")]
        assert store.seen[all_others - 1].startswith(("DELETE", "GET"))
    assert not RemoteFolder(url).files("1")
    assert newest(url) == 2


def failing(status):
    return lambda *_: (status, b"")


@both
@pytest.mark.parametrize("change", [unavailable, short, flipped, failing(500), failing(429)])
@pytest.mark.parametrize("part", ["record", "state"])
def test_an_answer_that_is_wrong_once_is_no_damage(store, url, hasty, part, change):
    saved(url, 1, 2)
    names = "/record/metadata" if part == "record" else "/state/"

    def is_asked(how, path):
        reads = store.scheme == "s3" or "alt=media" in path
        return how == "GET" and names in unquote(path) and "list-type" not in path and reads

    store.wrong.append([1, is_asked, change])
    warnings = []
    assert newest(url, warnings) == 2 and not warnings


@both
def test_a_store_that_does_not_answer_is_no_damage(store, url, hasty):
    saved(url, 1, 2)
    store.wrong.append(answers(store.path("2/record/metadata"), unavailable, times=10_000))
    with pytest.raises(StoreError), Checkpointer(url, 9, "", "max") as checkpointer:
        checkpointer.restore(jax.tree.map(jnp.zeros_like, state(0)))
    store.wrong.clear()
    assert newest(url) == 2


@both
def test_what_is_damaged_for_good_is_kept_aside(store, url, hasty):
    saved(url, 1, 2)
    record = RemoteFolder(url).read("2/record/metadata")
    RemoteFolder(url).write("2/record/metadata", record[:-9])
    warnings = []
    with Checkpointer(url, 9, "", "max", on_warning=warnings.append) as checkpointer:
        found = checkpointer.restore(jax.tree.map(jnp.zeros_like, state(0)))
        assert found.step == 1 and "2 is damaged" in warnings[0]
        checkpointer.save(2, state(2), {})
    assert newest(url) == 2
    assert RemoteFolder(url).read("damaged-2/record/metadata") == record[:-9]
    assert any("state" in name for name in RemoteFolder(url).files("damaged-2"))


def test_a_run_that_saves_nothing_deletes_nothing(url, hasty):
    saved(url, 1, 2)
    record = RemoteFolder(url).read("2/record/metadata")
    RemoteFolder(url).write("2/record/metadata", record[:-9])
    with Checkpointer(url, 1, "", "max") as checkpointer:
        assert checkpointer.restore(jax.tree.map(jnp.zeros_like, state(0))).step == 1
    with contextlib.suppress(ZeroDivisionError), Checkpointer(url, 1, "", "max") as checkpointer:
        checkpointer.restore(jax.tree.map(jnp.zeros_like, state(0)))
        raise ZeroDivisionError
    assert newest(url) == 1 and RemoteFolder(url).exists("2/record/metadata")


@both
def test_a_run_that_was_taken_over_deletes_nothing(url):
    def lost():
        raise StoreError("another run has taken over")

    saved(url, 1, 2)
    with (
        pytest.raises(StoreError, match="taken over"),
        Checkpointer(url, 1, "", "max", before_save=lost) as checkpointer,
    ):
        checkpointer.save(3, state(3), {})
    assert run_record.committed_steps(epath.Path(url)) == [1, 2]


def test_a_write_that_hangs_is_given_up():
    begun = time.monotonic()
    with pytest.raises(StoreError, match="not written after 0 s"):
        store_requests.within(0.2, lambda: time.sleep(3), "it is not written")
    assert time.monotonic() - begun < 2
    with pytest.raises(ZeroDivisionError):
        store_requests.within(5.0, lambda: 1 / 0, "")


@on_s3
def test_a_store_that_does_not_say_which_condition_failed(store, url):
    """As MinIO, whose answers lack a field that Amazon's have."""
    files = RemoteFolder(url)
    assert files.create("x", b"me")
    store.wrong.append([1, lambda how, path: how == "PUT", lambda status, body: (
        status, body.replace(b"<Condition>If-None-Match</Condition>", b""))])  # fmt: skip
    assert not files.create("x", b"you")
    assert files.read("x") == b"me"


def test_what_is_done_for_each_is_done_once_and_an_error_is_raised():
    done = []
    store_requests.each(done.append, (str(i) for i in range(100)))
    assert sorted(map(int, done)) == list(range(100))
    with pytest.raises(ZeroDivisionError):
        store_requests.each(lambda name: 1 / 0, ["a", "b"])
    store_requests.each(done.append, [])


def test_a_store_that_is_silent_is_spoken_of(store, url, hasty, monkeypatch, capsys):
    monkeypatch.setattr(store_requests, "SILENT", 0.3)
    RemoteFolder(url).write("x", b"1")
    store.wrong.append(answers(store.path("/x"), unavailable, times=10_000))
    with pytest.raises(StoreError, match="start the same command again when it does"):
        RemoteFolder(url).read("x")
    assert f"jaxvlm: {url}/x is read: the store has not done it yet" in capsys.readouterr().err


@both
def test_a_jobs_script_hears_of_checkpoints(store, url, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXVLM_SAVED", str(tmp_path / "saved"))
    with Checkpointer(url, 9, "", "max") as checkpointer:
        assert not (tmp_path / "saved").exists()
        checkpointer.save(1, state(1), {})
    assert (tmp_path / "saved").exists()
