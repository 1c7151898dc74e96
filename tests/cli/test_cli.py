"""The command line: help, one-line errors, exit codes, JSON."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import resource
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from runs import HERE, write_data

from jaxvlm.cli import main
from jaxvlm.cli.main import COMMANDS, run
from jaxvlm.parallel.distributed import processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = str(HERE / "recipe.py")


def fails(capsys, *argv: str) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    assert run(list(argv)) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    return err


def test_help_lists_each_command_and_each_explains_itself(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name}" in text
        assert run([name, "--help"]) == 0
        assert "flags:" in capsys.readouterr().out


def test_no_command_and_unknown_command(capsys):
    assert run([]) == 2
    capsys.readouterr()
    assert "commands: train, eval" in fails(capsys, "trian")


@pytest.mark.parametrize(
    "flag, says",
    [
        ("--config.optim.learning_rat=1", "learning_rate"),
        ("--config.optim.learning_rate=fast", "learning_rate"),
        ("--config.mesh.data=3", r"does not fit 8 devices"),
        ("--config.data.batch_size=12", "on 8 data shards of config.mesh does not divide"),
        ("--config.model.vision.patch_size=7", "not a multiple of patch_size=7"),
        ("--config.model.vision.stem=cnov", "known: linear, conv"),
        ("--config.model.dtype=float8", "known: float32, bfloat16"),
        ("--config.model.attention=falsh", "known: auto, xla, cudnn, flash"),
        (
            "--config.model.attention=flash",
            "'flash' runs on gpu and tpu, not on cpu; use 'auto'",
        ),
        ("--config.model.decoder.remat=all", "known: none, dots, full, offload"),
        ("--config.optim.schedule=cosin", "known: constant, linear, cosine"),
        ("--config.optim.frozen=('visoin/*',)", "no parameter matches 'visoin/*'"),
        ("--config.epochs=2.0", "set one of config.steps=12 and config.epochs=2"),
        ("--config.microbatches=3", "does not divide data.batch_size=8"),
        ("--config.model.connector.merge=3", "does not divide the 2 x 2 patches"),
        ("--config.init_from=/nowhere", "/nowhere"),
        ("--config.data.resize=stretch", "resize"),
        ("--config.optim.learning_rate=-1.0", "must be at least 0"),
        ("--config.data.workers=-3", "must be at least 1"),
        ("--config.model.decoder.depth=0", "at least 1 layer"),
        ("--config.eval_every=5", "eval_every=5 is not read without config.data.eval"),
        ("--config.eval_records=5", "eval_records=5 is not read without config.data.eval"),
        ("--config.early_stop=2", "early_stop=2 is not read without config.data.eval"),
        ("--config.checkpoint.metric=loss", "metric='loss' is not read without config.data.eval"),
        ("--config.checkpoint.mode=min", "mode='min' is not read without config.data.eval"),
        ("--config.data.buckets=2", "config.data.buckets=2 is not read without packing=False"),
        ("--config.loss.name=focal", "known: next_token"),
        (
            "--config.grad_cache.query_mini_batch=2",
            "query_mini_batch=2 is not read by config.loss",
        ),
        ("--config.dual.embed_dim=8", "config.dual.embed_dim=8 is not read by config.loss.name="),
        ("--config.embedding.dim=8", "config.embedding.dim=8 is not read by config.loss.name="),
        ("--config.embedder=dual", "config.embedder='dual' is not read by config.loss.name="),
        ("--config.optim.min_lr_ratio=0.5", "is not read with config.optim.schedule='constant'"),
        ("--config.checkpoint.mode=best", "known: max, min"),
        ("--config.checkpoint.keep=0", "at least 1"),
    ],
)
def test_bad_settings_are_one_line(capsys, tmp_path, flag, says):
    data = write_data(tmp_path, images=8)
    args = ["train", f"--config={RECIPE}:{data}", f"--workdir={tmp_path / 'run'}", flag]
    assert says in fails(capsys, *args)


def test_missing_inputs_are_one_line(capsys, tmp_path):
    assert "--config=FILE" in fails(capsys, "train", f"--workdir={tmp_path}")
    missing = fails(capsys, "train", "--config=nope.py", f"--workdir={tmp_path}")
    assert "no such recipe" in missing and "nope.py" in missing
    assert "--workdir=DIR" in fails(capsys, "train", f"--config={RECIPE}:x.jsonl")
    assert "nowhere.jsonl" in fails(
        capsys, "train", f"--config={RECIPE}:nowhere.jsonl", f"--workdir={tmp_path}"
    )
    assert "holds no run" in fails(capsys, "eval", f"--checkpoint={tmp_path}")
    assert "--prompt" in fails(capsys, "generate", f"--checkpoint={tmp_path}")
    assert "check FILE" in fails(capsys, "data", "chekc")


def test_print_config_prints_what_would_be_used(capsys, tmp_path):
    code = run(
        ["train", f"--config={RECIPE}:x.jsonl", "--print_config", "--config.seed=7", "--json"]
    )
    assert code == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert "config.seed=7" in lines and "config.optim.frozen=()" in lines
    assert json.loads(last)["seed"] == 7
    assert json.loads(last)["data"]["train"] == "x.jsonl"


def test_a_reader_that_has_gone_is_no_error():
    command = [sys.executable, "-m", "jaxvlm", "train", f"--config={RECIPE}:x.jsonl"]
    shell = f"{shlex.join([*command, '--print_config'])} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT)
    first, code = done.stdout.splitlines()
    assert first.startswith("config.") and code in ("0", "141") and not done.stderr


def test_only_standard_output_may_break(monkeypatch):
    def broken(argv):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(main, "run", broken)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main.main([])


def test_peers_that_can_not_be_reached_are_lost(capsys, tmp_path, monkeypatch):
    def fail():
        raise processes.JoinError("could not join process 0 at a:1")

    monkeypatch.setattr(processes, "initialize", fail)
    assert run(["train", f"--config={HERE / 'recipe.py'}:x", f"--workdir={tmp_path}"]) == 75
    assert capsys.readouterr().err == "jaxvlm: could not join process 0 at a:1\n"


def test_a_space_is_accepted_for_an_equals_sign(capsys):
    args = ["--config", f"{RECIPE}:x.jsonl", "--config.seed", "7", "--config.loss.name", "focal"]
    assert run(["train", *args, "--config.optim.frozen", "('vision/*',)", "--print_config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = ("data.train='x.jsonl'", "seed=7", "loss.name='focal'", "optim.frozen=('vision/*',)")
    assert {f"config.{line}" for line in said} <= set(lines)
    assert "no such recipe" in fails(capsys, "train", "--config", "nope.py:x", "--workdir", "w")


def test_dry_run_shows_the_loss_mask_and_writes_nothing(capsys, tmp_path):
    data = write_data(tmp_path, images=8)
    before = sorted(tmp_path.iterdir())
    assert run(["train", f"--config={RECIPE}:{data}", "--dry_run", "--json"]) == 0
    out = capsys.readouterr().out
    assert "[[" in out and "<image x4>" in out and "child of 1" in out
    assert json.loads(out.splitlines()[-1])["memory"]["peak"] > 0
    assert sorted(tmp_path.iterdir()) == before


def broken_records(folder):
    """One record for each kind of bad record, and the expected message."""
    write_data(folder, images=40)
    (folder / "empty.png").write_bytes(b"")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (64, 64, 3)).astype(np.uint8)).save(folder / "cut.jpg")
    whole = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (10_000, 10_000)).save(folder / "bomb.png")

    def record(name, image, text="<image>\nwhat?"):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
        return {"id": name, "messages": turns, "images": [image]}

    bad = [
        record("gone", "gone.png"),
        record("empty", "empty.png"),
        record("cut", "cut.jpg"),
        record("bomb", "bomb.png"),
        record("twice", "0.png", "<image><image> what?"),
        {"id": "mute", "messages": []},
    ]
    path = folder / "data.jsonl"
    lines = [json.dumps(r).encode() for r in bad]
    path.write_bytes(
        path.read_bytes() + b"\n".join([*lines, b'{"id": "\xff\xfe"}', b"{oops"]) + b"\n"
    )
    return path, ["gone", "empty", "cut", "bomb", "twice", "mute"]


def test_data_check_names_every_bad_record(capsys, tmp_path):
    path, names = broken_records(tmp_path)
    assert run(["data", "check", str(path), "--json"]) == 1
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    found = {name for ids in report["problems"].values() for name in ids}
    assert set(names) <= found
    assert len(found) == len(names) + 2  # and two lines that are not JSON
    assert report["good"] == 80


def test_data_check_takes_a_recipes_limits(capsys, tmp_path):
    data = write_data(tmp_path, images=8)
    assert run(["data", "check", str(data), f"--config={RECIPE}:{data}"]) == 0
    capsys.readouterr()
    limit = "--config.data.max_length=8"
    assert run(["data", "check", str(data), f"--config={RECIPE}:{data}", limit]) == 1
    assert "16  longer than data.max_length=8" in capsys.readouterr().out


def test_a_metric_that_is_not_evaluated_is_refused_before_the_first_step(capsys, tmp_path):
    data = write_data(tmp_path, images=8)
    args = ["train", f"--config={RECIPE}:{data}", f"--workdir={tmp_path / 'run'}"]
    more = [f"--config.data.eval={data}", "--config.checkpoint.metric=exact_macht"]
    says = fails(capsys, *args, *more)
    assert "known: loss, accuracy, exact_match, answers" in says


def test_bad_records_are_counted_and_too_many_stop_the_run(capsys, tmp_path):
    path, _ = broken_records(tmp_path)
    args = ["train", f"--config={RECIPE}:{path}", f"--workdir={tmp_path / 'run'}"]
    says = fails(capsys, *args)
    assert "max_skip_fraction" in says and "%" in says
    code = run(
        [
            *args,
            "--config.data.max_skip_fraction=0.2",
            "--config.steps=0",
            "--config.epochs=1.0",
            "--json",
        ]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert json.loads(captured.out.splitlines()[-1])["skipped_records"] >= 7
    assert "cut: truncated file" in captured.err  # detected only when it was decoded


def test_train_eval_generate(capsys, tmp_path):
    data = write_data(tmp_path)
    run_folder = tmp_path / "run"
    args = [f"--config={RECIPE}:{data}", f"--workdir={run_folder}", f"--config.data.eval={data}"]
    more = ["--config.eval_every=6", "--config.early_stop=1", "--config.steps=60", "--json"]
    more += ["--config.optim.learning_rate=1e-9", "--config.profile_steps=(2,4)"]
    assert run(["train", *args, *more, "--config.tensorboard=True"]) == 0
    captured = capsys.readouterr()
    assert f"steps 2 to 3 are traced in {run_folder / 'profile'}" in captured.out + captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert result["ended"] == "no better" and result["step"] == 12, "the second one was no better"
    assert {"exact_match", "loss"} <= result.keys()
    assert list((run_folder / "profile").rglob("*.xplane.pb"))
    assert list((run_folder / "tensorboard").iterdir())
    document = json.loads((run_folder / "config.json").read_text())
    assert document["versions"]["jax"] and document["devices"].startswith("8 x ")

    assert (
        run(
            [
                "eval",
                f"--checkpoint={run_folder}",
                f"--prediction_grid={tmp_path / 's.png'}",
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["exact_match"] == pytest.approx(result["exact_match"])
    assert report["answers"] == 80
    with Image.open(tmp_path / "s.png") as grid:
        assert grid.size[0] > 500

    image = str(tmp_path / "0.png")
    ask = ["generate", f"--checkpoint={run_folder}", f"--image={image}", "--prompt=is it red?"]
    assert run([*ask, "--max_new_tokens=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])["answer"]
    assert isinstance(answer, str)
    assert run([*ask, "--max_new_tokens=4", "--json", "--mesh=data=2,fsdp=2,tensor=2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answer"] == answer
    _compressed(capsys, run_folder, ask, answer, report)
    assert "--mesh=fsbp=8" in fails(capsys, *ask, "--mesh=fsbp=8")
    assert "does not fit 8 devices" in fails(capsys, *ask, "--mesh=tensor=2")
    assert "2 images" in fails(capsys, *ask[:3], f"--image={image}", "--prompt=<image> what?")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"x")
    assert "bad.png" in fails(capsys, ask[0], ask[1], f"--image={bad}", "--prompt=what?")


def _compressed(capsys, run_folder, ask, answer, report):
    """What ``generate`` and ``eval`` do with a compressed KV cache."""

    def said(*args):
        assert run([*args, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    whole = said(*ask, "--max_new_tokens=4", "--kv=vl_cache", "--kv_budget=1")
    assert whole["answer"] == answer and whole["kv_stored_bytes"] == whole["kv_whole_bytes"]
    tenth = said(*ask, "--max_new_tokens=4", "--kv=snapkv", "--kv_allocator=pyramid")
    assert tenth["kv_stored_bytes"] < 0.2 * tenth["kv_whole_bytes"] == 0.2 * whole["kv_whole_bytes"]
    command = ("eval", f"--checkpoint={run_folder}", "--kv=vl_cache", "--kv_budget=1")
    found = said(*command)
    for name in ("exact_match", "blind/exact_match"):
        assert found[name] == pytest.approx(report[name])
    assert found["answers"] == 80 and "loss" not in found
    fewer = said(*command[:3], "--kv_budget=0.3", "--batch_size=16", "--limit=20")
    assert fewer["kv_stored_bytes"] < 0.5 * fewer["kv_whole_bytes"] and fewer["answers"] == 20
    for given in ("--kv_budget=0.5", "--kv_budget=0.1", "--kv_queries=50", "--nokv_clip"):
        assert "is for a compressed KV cache" in fails(capsys, *ask, given)
    assert "kv='h2o'" in fails(capsys, *ask, "--kv=h2o")
    assert "--kv=vl_cache is for answers" in fails(capsys, *command, "--retrieval")


def test_one_run_at_a_time_in_a_folder(capsys, tmp_path):
    from jaxvlm.checkpoint.run_record import locked

    data = write_data(tmp_path, images=8)
    with locked(tmp_path / "run"):
        args = ["train", f"--config={RECIPE}:{data}", f"--workdir={tmp_path / 'run'}"]
        assert "another run is writing to it" in fails(capsys, *args)


def test_an_answer_with_an_unknown_token_is_never_correct(capsys, tmp_path):
    data = write_data(tmp_path, images=8)
    folder = tmp_path / "run"
    assert run(["train", f"--config={RECIPE}:{data}", f"--workdir={folder}", "--json"]) == 0
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace('"yes"', '"jawohl"').replace('"no"', '"nein"'))
    capsys.readouterr()
    command = ["eval", f"--checkpoint={folder}", f"--data={other}", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["exact_match"] <= 0.5, "half of the records answer with unknown words"


def test_a_lost_tokenizer_is_not_trained_again(capsys, tmp_path):
    import shutil

    data = write_data(tmp_path, images=8)
    args = ["train", f"--config={RECIPE}:{data}", f"--workdir={tmp_path / 'run'}", "--json"]
    assert run([*args, "--config.steps=4"]) == 0
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    capsys.readouterr()
    assert "is missing" in fails(capsys, *args)
    ask = ["generate", f"--checkpoint={tmp_path / 'run'}", "--prompt=what?"]
    assert "is missing" in fails(capsys, *ask)


def _a_file_in_the_way(folder: pathlib.Path) -> str:
    (folder / "there").write_text("mine")
    return str(folder / "there")


def _below_a_file(folder: pathlib.Path) -> str:
    return _a_file_in_the_way(folder) + "/run"


def _too_long(folder: pathlib.Path) -> str:
    return str(folder / ("x" * 300))


@pytest.mark.parametrize("workdir", [_a_file_in_the_way, _below_a_file, _too_long])
def test_a_workdir_that_can_not_be_is_one_line(capsys, tmp_path, workdir):
    name = workdir(tmp_path)
    text = fails(capsys, "train", f"--config={RECIPE}:{write_data(tmp_path)}", f"--workdir={name}")
    assert "there" in text or "xxx" in text
    assert name.startswith(str(tmp_path / "x")) or (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("named", [True, False])
def test_a_disk_that_takes_nothing_more_is_one_line(capsys, monkeypatch, code, named):
    def full(*_):
        name = ("/runs/a/metrics.jsonl",) if named else ()
        raise OSError(code, os.strerror(code), *name)

    monkeypatch.setattr("jaxvlm.cli.train.run", full)
    text = fails(capsys, "train", f"--config={RECIPE}:x", "--workdir=x")
    assert ("/runs/a/metrics.jsonl" if named else "a file that is being written") in text
    assert os.strerror(code).lower() in text and "; " in text


def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))

    args = ("train", f"--config={RECIPE}:{write_data(tmp_path)}", f"--workdir={tmp_path / 'run'}")
    ended = subprocess.run(
        [sys.executable, "-c", "from jaxvlm.cli.main import main; main()", *args,
         "--config.compile_cache="],
        capture_output=True, text=True, preexec_fn=limited, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "writing a checkpoint to" in ended.stderr.splitlines()[-1]


def test_other_errors_of_the_system_are_not_hidden(monkeypatch):
    def broken(*_):
        raise OSError(errno.EBADF, "bad file descriptor")

    monkeypatch.setattr("jaxvlm.cli.train.run", broken)
    with pytest.raises(OSError, match="bad file"):
        run(["train", f"--config={RECIPE}:x", "--workdir=x"])


RAISES = {
    "missing": ("def get_config(name):\n    return name\n", "give its argument behind a colon"),
    "argument": ("def get_config():\n    pass\n", "what stands behind a colon is its argument"),
    "type": ("def get_config(a=''):\n    return len(3)\n", ":2: TypeError: object of type 'int'"),
    "value": ("def get_config(a=''):\n    return int('x')\n", ":2: ValueError: invalid literal"),
    "key": ("def get_config(a=''):\n    return {}['b']\n", ":2: KeyError: 'b'"),
    "unicode": ("def get_config(a=''):\n    return b'\\xff'.decode()\n", ":2: UnicodeDecodeError"),
    "import": ("import nowhere_at_all\n", ":1: ModuleNotFoundError"),
    "file": ("def get_config(a=''):\n    return open('gone.txt')\n", "gone.txt"),
}


@pytest.mark.parametrize("kind", RAISES)
def test_a_recipe_that_raises_is_one_line_that_names_its_own(capsys, tmp_path, kind):
    code, says = RAISES[kind]
    recipe = tmp_path / "own.py"
    recipe.write_text(code)
    argument = ":x" if kind == "argument" else ""
    line = fails(capsys, "train", f"--config={recipe}{argument}", f"--workdir={tmp_path / 'run'}")
    assert says in line and "Traceback" not in line and "whilst" not in line, line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "args, flag",
    [
        (["embed", "--checkpoint=run", "--texts=t.txt"], "output"),
        (["mine", "--checkpoint=run", "--data=t.jsonl"], "output"),
        (["plan", "--model=x", "--devices=h200:1"], "save"),
        (["plan", "--model=x", "--devices=h200:1"], "html"),
        (["sweep", "status"], "workdir"),
        (["sweep", f"--config={RECIPE}:x", "--grid=seed=0,1"], "workdir"),
        (["federate", "simulate", f"--config={RECIPE}:x"], "workdir"),
        (["launch", "slurm", "--devices=cpu:2", "--dry_run"], "output"),
    ],
)
def test_what_can_not_be_in_a_bucket_is_refused_by_its_flag(args, flag, capsys, tmp_path):
    for url in ("s3://bucket/x", "s3:/bucket/x"):
        code = run([*args, f"--{flag}={url}"])
        said = capsys.readouterr().err
        assert code == 2 and url in said, said
        assert "can't be in an object store" in said or "with ://" in said
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("url", ["az://b/run", "s3://bucket", "gs://b/a#1"])
def test_a_launched_run_must_have_a_workdir_that_it_will_take(url, capsys):
    args = ["launch", "slurm", "--devices=cpu:2", "--dry_run", "--skip_plan", "--", "train"]
    code = run([*args, f"--config={RECIPE}:x", f"--workdir={url}"])
    assert code == 2 and f"--workdir={url}: " in capsys.readouterr().err
