"""Federated runs: one site is the plain run, kills change no bit, caches know their version."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import write_llava
from runs import losses, recipe

import jaxvlm
from configs import federated, quickstart
from jaxvlm.config import ConfigError, FederateConfig, OuterConfig, from_config_dict
from jaxvlm.federate import messages, status
from jaxvlm.federate.client import Client
from jaxvlm.federate.service import Service
from jaxvlm.sites.simulate import Simulation
from jaxvlm.sites.site import make_site
from jaxvlm.train.loop import TrainingStopped

ROOT = pathlib.Path(__file__).parents[2]


def made(data, sites=1, rounds=3, steps=4):
    """The recipe as a federation."""
    config = recipe(data)
    config.checkpoint.every = 0  # as in recipes of federations: checkpoints follow exchanges
    config.federate.sites, config.federate.rounds, config.outer.steps = sites, rounds, steps
    config.steps = rounds * steps
    return config


def plain(config):
    """The same recipe without its federation."""
    config = from_config_dict(config)
    return dataclasses.replace(config, federate=FederateConfig(), outer=OuterConfig())


def silent(line):
    """Takes lines for people."""


def fitted(config, folder, service=None, name="a", **more):
    service = service or Service(from_config_dict(config), folder / "coordinator", silent)
    site = make_site(config, folder / name, Client(name, service.handle), log=silent, **more)
    site.fit()
    return site, service


def assert_same_weights(a, b):
    for path, x in a.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(b[path]), err_msg=path)


def test_one_site_is_the_plain_run(data, tmp_path):
    config = made(data)
    alone = jaxvlm.Trainer(plain(config), tmp_path / "plain")
    alone.fit()
    site, service = fitted(config, tmp_path)
    assert losses(site.workdir) == losses(alone.workdir)
    assert_same_weights(alone.state.params, site.state.params)
    assert_same_weights(alone.state.params, service.state.params)
    assert service.state.version == 3 and service.is_over


class Stop(Exception):
    """What a kill is to a run in this process."""


class KillAt(jaxvlm.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, metrics):
        if step == self.step:
            raise Stop


@pytest.mark.parametrize("kill, every", [(3, 0), (4, 0), (5, 0), (8, 3), (12, 3)])
def test_a_killed_site_goes_on_to_the_same_bits(data, tmp_path, whole_site, kill, every):
    config = made(data)
    config.checkpoint.every = every
    service = Service(from_config_dict(config), tmp_path / "coordinator", silent)
    with pytest.raises(Stop):
        fitted(config, tmp_path, service, callbacks=[KillAt(kill)])
    site, _ = fitted(config, tmp_path, service)
    assert_same_weights(whole_site.state.params, site.state.params)
    assert losses(site.workdir)[12] == losses(whole_site.workdir)[12]


@pytest.fixture(scope="module")
def whole_site(data, tmp_path_factory):
    return fitted(made(data), tmp_path_factory.mktemp("whole"))[0]


def test_an_answer_lost_after_the_update_was_judged(data, tmp_path, whole_site):
    """The site dies before it hears of its update: sent again, it is a duplicate."""
    config = made(data)
    service = Service(from_config_dict(config), tmp_path / "coordinator", silent)
    calls = []

    def call(message):
        answer = service.handle(message)
        calls.append(message)
        if len(calls) == 5:  # join twice, fetch, submit, fetch
            raise Stop
        return answer

    with pytest.raises(Stop):
        make_site(config, tmp_path / "a", Client("a", call), log=silent).fit()
    site, _ = fitted(config, tmp_path, service)
    assert_same_weights(whole_site.state.params, site.state.params)
    record = service.state.sites["a"]
    assert (record.accepted, record.duplicates) == (3, 1)


def simulated(config, folder, **more):
    simulation = Simulation(config, folder, log=silent, **more)
    return simulation, simulation.run()


def test_two_sites_share_one_model(data, tmp_path):
    simulation, result = simulated(made(data, sites=2), tmp_path)
    first, second = simulation.sites.values()
    assert_same_weights(first.state.params, second.state.params)
    assert result["version"] == 3
    assert [site["accepted"] for site in result["sites"].values()] == [3, 3]
    # Each has records of its own, and together they have all.
    files = sorted((tmp_path / "data").glob("*.jsonl"))
    counts = [len(file.read_text().splitlines()) for file in files]
    assert sum(counts) == 80 and min(counts) > 0


def test_a_federation_goes_on_from_anothers_weights(data, tmp_path):
    first, _ = simulated(made(data, sites=2, rounds=1), tmp_path / "first")
    config = made(data, sites=2, rounds=1)
    config.init_from = str(tmp_path / "first" / "site-0")
    simulated(config, tmp_path / "more")
    start = tmp_path / "more" / "coordinator" / "versions" / "0.safetensors"
    found = safetensors.numpy.load_file(start)
    want = {f"params/{path}": x for path, x in first.sites["site-0"].state.params.items()}
    assert_same_weights(want, found)


def test_a_slow_site_is_not_waited_for(data, tmp_path):
    config = made(data, sites=2, rounds=6)
    config.federate.buffer, config.federate.max_staleness = 1, 4
    _, result = simulated(config, tmp_path, seconds=[1.0, 4.0])
    fast, slow = result["sites"].values()
    assert fast["accepted"] >= 4 and slow["accepted"] + slow["late"] >= 1
    versions = status.read_status(tmp_path)["versions"]
    assert max(max(r["lags"]) for r in versions) >= 2


def encoded(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [m["train/cache/encoded"] for m in map(json.loads, lines) if "train/cache/encoded" in m]


def test_a_frozen_encoders_tokens_are_encoded_once(data, tmp_path):
    config = made(data)
    config.data.flip, config.data.max_shift, config.log_every = False, 0, 1
    config.cache.policy, config.cache.encode_batch = "strict", 2
    config.optim.frozen = ("vision/*",)
    site, _ = fitted(config, tmp_path)
    # Forty images in twelve steps: none is recomputed after any of three outer updates.
    assert sum(encoded(site.workdir)) == 40
    config.federate.cache_invalidation = "flush"  # a frozen encoder's tokens are never stale
    again, _ = fitted(config, tmp_path / "flush")
    assert sum(encoded(again.workdir)) == 40


@pytest.mark.parametrize("how", ["digest", "lazy", "flush"])
def test_a_trained_encoders_tokens_grow_older_with_outer_updates(data, tmp_path, how):
    config = made(data, rounds=4, steps=3)
    config.data.flip, config.data.max_shift, config.log_every = False, 0, 1
    config.cache.policy, config.cache.max_staleness = "lazy", 100
    config.cache.encode_batch = 2
    config.federate.cache_invalidation = how
    site, _ = fitted(config, tmp_path)
    version = int(site.state.cache.version)
    # Twelve steps; one site's version is what it has itself, so by digest nothing has changed.
    assert version == {"digest": 12, "lazy": 12 + 4, "flush": 12 + 4 * 101}[how]
    if how == "flush":
        counts = encoded(site.workdir)
        assert sum(counts) > 60 > 40  # what is shown after an outer update is recomputed


def test_settings_that_no_federation_can_use(data, tmp_path):
    for change, words in (
        ({"sites": 0}, "sites=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"buffer": 3}, "buffer=3 is above"),
        ({"buffer": 1}, "max_staleness=0"),
        ({"aggregator": "krum"}, "at least 3"),
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"byzantine": 1}, "byzantine"),
        ({"deadline_s": 5.0}, "set both, or neither"),
        ({"lora": "freeze_a"}, "not read without adapters"),
    ):
        config = made(data, sites=2)
        for name, value in change.items():
            config.federate[name] = value
        with pytest.raises(ConfigError, match=words):
            service = Service(from_config_dict(config), tmp_path / "c", silent)
            make_site(config, tmp_path / "a", Client("a", service.handle), log=silent)
    config = made(data)
    config.steps = 11
    with pytest.raises(ConfigError, match="need 12: set"):
        make_site(config, tmp_path / "a", Client("a", lambda data: data), log=silent)


def test_a_federations_recipe_is_no_plain_run(data, tmp_path):
    with pytest.raises(ConfigError, match="jaxvlm federate"):
        jaxvlm.Trainer(made(data), tmp_path / "plain")


@pytest.mark.parametrize("how", ["product", "freeze_a"])
def test_adapters_alone_are_sent(data, tmp_path, how):
    config = made(data, sites=2, rounds=2, steps=3)
    config.model.lora.rank, config.model.lora.alpha = 2, 4.0
    config.federate.lora = how
    if how == "product":
        with pytest.raises(ConfigError, match=r"config\.outer\.moments=reset"):
            simulated(config, tmp_path)
        config.outer.moments = "reset"
    lines = []
    simulation = Simulation(config, tmp_path, log=lines.append)
    simulation.run()
    first, second = simulation.sites.values()
    trained = first.state.params
    assert {path.rsplit("/", 1)[-1] for path in trained} == (
        {"lora_b"} if how == "freeze_a" else {"lora_a", "lora_b"}
    )
    assert_same_weights(trained, second.state.params)
    assert_same_weights(first.state.frozen, second.state.frozen)
    versions = status.read_status(tmp_path)["versions"]
    if how == "product":  # two sites' products of rank 2 have a mean of rank 4
        assert 0 < versions[-1]["lora_lost"] < 0.5
        assert any("beyond their rank" in line for line in lines)
    else:
        assert {v["lora_lost"] for v in versions} == {0}


@pytest.mark.parametrize("dtype", ["int4", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_rounded_updates_of_a_killed_site_repeat(data, tmp_path, dtype):
    """Its rounding errors are part of what it resumes from."""
    config = made(data)
    config.outer.delta_dtype = dtype
    whole, _ = fitted(config, tmp_path / "whole")
    service = Service(from_config_dict(config), tmp_path / "coordinator", silent)
    with pytest.raises(Stop):
        fitted(config, tmp_path, service, callbacks=[KillAt(10)])
    site, _ = fitted(config, tmp_path, service)
    assert_same_weights(whole.state.params, site.state.params)


@pytest.mark.parametrize("axes", [{"fsdp": 4, "data": 2}, {"fsdp": 2, "tensor": 2, "data": 2}])
def test_a_sites_mesh_is_its_own(data, tmp_path, whole_site, axes):
    config = made(data)
    for axis, size in axes.items():
        config.mesh[axis] = size
    config.outer.moments = "keep"
    site, service = fitted(config, tmp_path)
    for path, x in whole_site.state.params.items():
        other = np.asarray(site.state.params[path])
        # Twelve steps of Adam, which turns a rounding of a small gradient into a whole step.
        assert np.abs(other - np.asarray(x)).max() < 2e-3, path
    assert service.state.version == 3


def test_reset_moments_are_those_of_a_new_run(data, tmp_path):
    config = made(data, rounds=2, steps=3)
    config.outer.moments = "reset"
    site, _ = fitted(config, tmp_path)
    (adam,) = (x for x in site.state.opt_state if hasattr(x, "mu"))
    assert int(adam.count) == 0 and not any(np.asarray(x).any() for x in adam.mu.values())


def test_a_site_that_lost_a_round_says_so(data, tmp_path):
    """Its steps are over before the federation is, and the other would wait for ever."""
    config = made(data, sites=2)

    def poisoned(site, call):
        def wrapped(message):
            if site == "site-1" and not sent and messages.unpack(message).kind == "submit":
                sent.append(message)
                update = messages.unpack_update(messages.unpack(message))
                bad = dataclasses.replace(update, tokens=0.0)
                session = messages.unpack(message).head["session"]
                message = messages.pack_update(bad, session)
            return call(message)

        return wrapped

    sent = []
    with pytest.raises(TrainingStopped, match=r"site-1: the site's 12 steps are over"):
        simulated(config, tmp_path, wrap=poisoned)


def test_a_site_of_an_ended_federation_begins_no_other(data, tmp_path):
    """Its weights are trained: no new coordinator may take them for first ones."""
    simulated(made(data, rounds=1), tmp_path)
    shutil.rmtree(tmp_path / "coordinator")
    with pytest.raises(ConfigError, match=r"holds a site of another federation.*begins a new one"):
        simulated(made(data, rounds=2), tmp_path)


def test_noise_has_an_accountant(data, tmp_path):
    config = made(data, sites=2, rounds=2, steps=3)
    federate = config.federate
    federate.max_delta_norm, federate.noise_multiplier = 0.05, 2.0
    with pytest.raises(ConfigError, match="weighting='uniform'"):
        simulated(config, tmp_path)
    federate.weighting, federate.buffer, federate.max_staleness = "uniform", 1, 1
    with pytest.raises(ConfigError, match="leave both at 0"):
        simulated(config, tmp_path)
    federate.buffer, federate.max_staleness = 0, 0
    simulated(config, tmp_path)
    versions = status.read_status(tmp_path)["versions"]
    assert 0 < versions[0]["epsilon"] < versions[1]["epsilon"] < 20
    assert versions[0]["clipped"] == 2


def test_pairs_of_two_sites(captions, tmp_path):
    """Each has texts of its own; the tokenizer is of both."""
    config = recipe(captions)
    config.loss.name = "info_nce"
    config.data.flip, config.data.max_shift = False, 0
    config.federate.sites, config.federate.rounds, config.outer.steps = 2, 2, 2
    config.steps = 4
    with pytest.raises(ConfigError, match="give each its file"):
        simulated(config, tmp_path)
    lines, files = captions.read_text().splitlines(keepends=True), []
    for i in range(2):
        files.append(captions.with_name(f"site-{i}.jsonl"))
        files[i].write_text("".join(lines[20 * i : 20 * i + 20]))
    simulation, _ = simulated(config, tmp_path / "two", data=list(map(str, files)))
    first, second = simulation.sites.values()
    assert_same_weights(first.state.params, second.state.params)
    assert first.tokenizer.backend.token_to_id("39") is not None  # the other's word alone


def test_the_recipes_small_model_is_the_quickstarts():
    assert federated.get_config().model == quickstart.get_config().model
    assert federated.get_config().data == quickstart.get_config().data


def test_arguments_of_the_recipe_are_named():
    with pytest.raises(ConfigError, match=r"'hospitals,x'; known: hospitals; lora,HF_FOLDER"):
        federated.get_config("hospitals,x")


def test_the_example_writes_nothing_without_a_folder(tmp_path):
    for arg, code in ((), 2), (("--help",), 0):
        command = [sys.executable, str(ROOT / "examples" / "two_hospitals.py"), *arg]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code and "OUT" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("arg", ["", "hospitals", "lora", "contrastive"])
def test_recipes_run(data, captions, tmp_path, arg):
    """Two rounds of each; the hospitals' data are those that the example makes."""
    files = [str(captions if arg == "contrastive" else data)] * 2
    if arg == "hospitals":
        command = [sys.executable, "examples/two_hospitals.py", str(tmp_path / "made")]
        subprocess.run(command, check=True, cwd=ROOT)
        files = [str(tmp_path / "made" / f"{name}.jsonl") for name in ("north", "south")]
    if arg == "lora":
        arg = f"lora,{write_llava(tmp_path / 'hf', data)}"
    config = federated.get_config(arg)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval="", batch_size=8),
        federate=dataclasses.replace(config.federate, sites=2, rounds=2),
        outer=dataclasses.replace(config.outer, steps=2),
        steps=4,
    )
    simulation, result = simulated(config, tmp_path / "run", data=files)
    first, second = simulation.sites.values()
    assert result["version"] == 2
    assert_same_weights(first.state.params, second.state.params)
