"""A loss of the user's own: what it must give, and what is said where it gives something else."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from builders import VOCAB, random_batch
from pair_cases import embeddings_of, pairs_of
from runs import HERE, write_data

from jaxvlm.cli import main
from jaxvlm.config import Config, ConfigError, LossConfig, PairLossConfig
from jaxvlm.losses.custom_loss import RESERVED, RESERVED_PREFIXES, check_sums
from jaxvlm.losses.registry import TOKEN_LOSSES, loss_setting, make_loss
from jaxvlm.train.grad_accum import check_microbatches, scales
from jaxvlm.train.metrics import read_metrics
from jaxvlm.types import Out

LOSS = """
import dataclasses
import jax
import jax.numpy as jnp
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.types import Sums

@dataclasses.dataclass(frozen=True)
class Mine:
    additive = True
    def coefficients(self):
        return {"loss": 1.0}
    def weights(self, batch):
        return {"loss": jnp.sum(targets(batch)[1])}
    def __call__(self, out, batch):
        labels, weight = targets(batch)
        nll, _ = token_scores(out, labels)
        total = jnp.sum(nll * weight)
        return Sums({"loss": total}, {})

@dataclasses.dataclass(frozen=True)
class Pull:
    trains_embeddings = True
    additive = True
    def coefficients(self):
        return {"loss": 1.0}
    def weights(self, batch):
        return {"loss": jnp.sum(batch.valid[:, 0])}
    def __call__(self, out, batch):
        far = 1 - jnp.sum(out.query * out.document[:, 0], axis=-1)
        total = jnp.sum(far * batch.valid[:, 0])
        return Sums({"loss": total}, {"far": (total, jnp.sum(batch.valid[:, 0]))})
"""
LINES = {name: LOSS.split(f"def {name}")[0].count("\n") + 1 for name in ("weights", "__call__")}
GIVES = "return Sums({"
WEIGHTS = 'return {"loss": jnp.sum(targets(batch)[1])}'
MEAN = ("total = jnp.sum(nll * weight)", "total = jnp.mean(nll)")


def changed(folder, *changes, name="Mine", **settings):
    """The loss with pieces of its text replaced, and the setting that names it."""
    text = LOSS
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    (folder / "mine.py").write_text(text)
    group = LossConfig(target=f"{folder}/mine.py:{name}")
    config = Config(loss=group, **settings)
    return make_loss(config), loss_setting(config)


def checked(folder, *changes):
    """What :func:`check_sums` says of a loss of tokens, on two rows and random hidden states."""
    loss, what = changed(folder, *changes)
    batch = jax.tree.map(jnp.asarray, random_batch())
    hidden = jax.random.normal(jax.random.key(0), (*batch.tokens.shape, 4))
    head = jax.random.normal(jax.random.key(1), (4, VOCAB))
    check_sums(loss, what, Out(hidden, head), batch)


def test_sums_are_passed_on(tmp_path):
    checked(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        [MEAN],
        [("total = jnp.sum(nll * weight)", "total = jnp.sum(nll * weight) / len(nll)")],
        [(MEAN[0], f"{MEAN[0]} / jnp.sum(weight)")],
        [(MEAN[0], "total = jnp.max(nll)")],
    ],
)
def test_a_mean_is_refused(tmp_path, changes):
    with pytest.raises(ConfigError, match=r"'loss' is no sum over examples.*return sums") as error:
        checked(tmp_path, *changes)
    assert f"config.loss.target='{tmp_path}/mine.py:Mine'" in str(error.value)
    checked(tmp_path, *changes, ("additive = True", "additive = False"))  # it says so: no question


def test_a_loss_of_pairs_is_asked_too(tmp_path):
    mean = ("jnp.sum(far * batch.valid[:, 0])", "jnp.mean(far)")
    for settings in ({}, {"pair_loss": PairLossConfig(matryoshka_dims=(4, 8))}):
        loss, what = changed(tmp_path, name="Pull", **settings)
        check_sums(loss, what, embeddings_of(b=6), pairs_of(b=6))
        loss, what = changed(tmp_path, mean, name="Pull", **settings)
        with pytest.raises(ConfigError, match="is no sum over examples"):
            check_sums(loss, what, embeddings_of(b=6), pairs_of(b=6))


@pytest.mark.parametrize(
    "member, change, says",
    [
        (
            "__call__",
            ('Sums({"loss": total}', "Sums({}"),
            "gave {} as Sums.terms; it must give a dict with a number for each term",
        ),
        (
            "__call__",
            ('{"loss": total}', '{"loss": total, "extra": total}'),
            "gave the terms 'extra', 'loss', and coefficients() gives 'loss'",
        ),
        ("__call__", ('{"loss": total}', '{"los": total}'), "gave the terms 'los'"),
        ("weights", (WEIGHTS, "return {}"), "gave {}; it must give a dict"),
        ("weights", (WEIGHTS, "return 3.0"), "gave 3.0; it must give a dict"),
        ("weights", (WEIGHTS, 'return {"los": 1}'), "gave the terms 'los'"),
        (
            "weights",
            (WEIGHTS, 'return {"loss": targets(batch)[1]}'),
            "gave an array of shape [8, 32] for the term 'loss'; it must give one number",
        ),
        ("__call__", ('Sums({"loss": total}, {})', "total"), "gave an array of shape []"),
        ("__call__", ('Sums({"loss": total}, {})', '({"loss": total}, {})'), "gave a tuple"),
        ("__call__", ('{"loss": total}', '{"loss": nll}'), "gave an array of shape [8, 32] for"),
        ("__call__", ('{"loss": total}', '{"loss": 3}'), "gave a whole number for the term"),
        ("__call__", ("total}, {})", "total}, None)"), "gave None as Sums.metrics"),
        (
            "__call__",
            ("total}, {})", 'total}, {"a": total})'),
            "for the metric 'a'; it must",
        ),
        ("__call__", ("total}, {})", 'total}, {"a": (nll, 1)})'), "for the sum of the metric 'a'"),
        ("__call__", ("total}, {})", 'total}, {"a": (1, "b")})'), "the weight of the metric 'a'"),
        ("__call__", ("total}, {})", 'total}, {"loss": (1, 1)})'), "a metric named 'loss', which"),
        ("__call__", ("total}, {})", 'total}, {"loss/x": (1, 1)})'), "named 'loss/x', which is"),
        ("__call__", ("total}, {})", 'total}, {"step_ms": (1, 1)})'), "named 'step_ms', which is"),
    ],
)
def test_what_is_no_sum_is_named_with_its_line(tmp_path, member, change, says):
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, change)
    assert f"mine.py:Mine': {member}() at mine.py:{LINES[member]} gave" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "change, says",
    [
        (("nll, _ = token_scores(out, labels)", "nll, _ = None"), "TypeError: cannot unpack"),
        (("labels, weight = targets(batch)", "if out.hidden[0, 0, 0] > 0: pass"), "TracerBool"),
        ((WEIGHTS, "return batch.nothing"), "weights() failed at mine.py:14: AttributeError"),
    ],
)
def test_code_that_fails_is_named_with_its_line(tmp_path, change, says):
    with pytest.raises(ConfigError, match=r"failed at mine\.py:") as error:
        checked(tmp_path, change)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, says",
    [
        (('{"loss": 1.0}', "{}"), "coefficients() at mine.py:11 gave {}"),
        (('{"loss": 1.0}', '{"loss": float("nan")}'), "gave nan for 'loss'"),
        (('{"loss": 1.0}', '{"loss": 0}'), "gave 0 for every term"),
        (('{"loss": 1.0}', "[1.0]"), "gave a list; it must give a dict"),
        (("additive = True", "def additive(self): return True"), "must be True or False"),
        (("def weights", "def weight"), "it has no weights"),
    ],
)
def test_a_loss_is_looked_at_when_it_is_made(tmp_path, change, says):
    with pytest.raises(ConfigError) as error:
        changed(tmp_path, change)
    assert says in str(error.value)


def test_a_negative_weight_is_refused_and_makes_a_step_bad(tmp_path):
    negative = (WEIGHTS, 'return {"loss": -1}')
    with pytest.raises(ConfigError, match=r"weights\(\) gave -1 for the term 'loss'"):
        checked(tmp_path, negative)
    for value, isnan in (("-1", True), ("jnp.nan", True), ("0", False), ("2", False)):
        loss, _ = changed(tmp_path, (WEIGHTS, f'return {{"loss": {value}}}'))
        assert bool(jnp.isnan(scales(loss, random_batch())["loss"])) == isnan


def test_microbatches_name_the_users_class(tmp_path):
    loss, _ = changed(tmp_path, ("additive = True", "additive = False"))
    with pytest.raises(ConfigError, match="microbatches=2: Mine is not a sum over examples"):
        check_microbatches(2, loss, 8)


def test_the_loss_can_be_a_static_argument(tmp_path):
    assert hash(changed(tmp_path)[0]) == hash(changed(tmp_path)[0])


def train(folder, monkeypatch, capfd, *changes, name="Mine", code=0, flags=()):
    """A run of three steps in ``folder``: what it said."""
    changed(folder, *changes, name=name)
    if not (folder / "data.jsonl").exists():
        write_data(folder, images=8)
        pairs = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(16)]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    recipe = "import sys; sys.path.insert(0, {!r})\nfrom recipe import get_config"
    (folder / "run.py").write_text(recipe.format(str(HERE)))
    monkeypatch.chdir(folder)
    data = "pairs.jsonl" if name == "Pull" else "data.jsonl"
    given = ["--config.steps=3", "--config.checkpoint.every=0", *flags]
    done = main.run(
        ["train", f"--config=run.py:{data}", "--workdir=run", *given]
        + [f"--config.loss.target=mine.py:{name}"]
    )
    said = "".join(capfd.readouterr())
    assert done == code, said[-3000:]
    return said


@pytest.mark.parametrize(
    "name, change",
    [("Mine", MEAN), ("Pull", ("jnp.sum(far * batch.valid[:, 0])", "jnp.mean(far)"))],
)
def test_a_run_refuses_a_mean_before_it_writes_a_file(tmp_path, monkeypatch, capfd, name, change):
    said = train(tmp_path, monkeypatch, capfd, change, name=name, code=2)
    assert f"mine.py:{name}'" in said and "is no sum over examples" in said
    assert said.splitlines()[-1].startswith("jaxvlm: config.loss.target=")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["Mine", "Pull"])
def test_a_run_reserves_the_names_that_it_writes(tmp_path, monkeypatch, capfd, name):
    train(tmp_path, monkeypatch, capfd, name=name, flags=["--config.microbatches=1"])
    lines = read_metrics(tmp_path / "run")
    written = {key.removeprefix("train/") for line in lines for key in line if "train/" in key}
    assert "loss" in written and not any(name.startswith("no_weight") for name in written)
    own = {"far"} if name == "Pull" else set()
    assert {x for x in written if not x.startswith(RESERVED_PREFIXES)} - RESERVED == own


def test_a_run_without_weights_stops(tmp_path, monkeypatch, capfd):
    nothing = (WEIGHTS, 'return {"loss": jnp.float32(0)}')
    said = train(tmp_path, monkeypatch, capfd, nothing, code=1)
    assert "step 1: the loss's weight of 'loss' is 0 in every step since the last line" in said
    assert "step 3: the loss's weight of 'loss' is 0 in all of 3 steps" in said
    assert "config.max_bad_steps=10" in said


def test_the_help_names_the_built_in_losses():
    from jaxvlm.config.describe import groups
    from jaxvlm.losses.registry import PAIR_LOSSES

    (name,) = [s for g in groups() for s in g.settings if s.path == "config.loss.name"]
    assert name.allowed == (*TOKEN_LOSSES, *PAIR_LOSSES)
