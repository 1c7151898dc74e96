"""A run's exchange with a federation's coordinator, every ``config.outer.steps`` steps."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError
from jaxvlm.federate import codec, messages
from jaxvlm.federate.client import Client, Offer, Stopped
from jaxvlm.federate.messages import Update, group_digests
from jaxvlm.optim.optimizer import reset_moments
from jaxvlm.sites.facts import facts_of_run, host_params
from jaxvlm.train.callbacks import Callback, CheckpointRecord, Exchanged, StepBatch
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer.run import Run
from jaxvlm.types import Pairs, TrainState, is_vision_path

EXTRA = "federate"
"""Name of what a checkpoint keeps of the site, and of its folder in the workdir."""
_MAX_REFUSED = 3
"""Updates refused in a row as bad after which the site stops."""
_PARAM, _ERROR = "params/", "error/"


@dataclasses.dataclass
class Round:
    """What a site counts between two exchanges; JSON-able, kept with each checkpoint."""

    version: int
    """The version that it trains from."""
    number: int
    """Of its last update."""
    start: dict[str, str]
    """Digests of the parameters that the run had at step 0, by submodel."""
    federation: str
    """Id of the federation."""
    step: int = 0
    """The step of the last exchange, by which the version's file is named."""
    base: str = ""
    """Digest of the file that holds the version's parameters."""
    steps: int = 0
    tokens: float = 0.0
    """That the loss covers; of pairs, examples."""
    loss: float = 0.0
    """Sum over the steps."""
    token_lag: int = 0
    """Largest lag of the visual tokens that were read."""
    refused: int = 0
    """Updates refused in a row as bad."""


class FederationCallback(Callback):
    """Sends a run's update at each exchange, and gives it the federation's next version.

    Args:
        client: of the coordinator.
        log: takes lines for people.
    """

    is_federated = True
    saves_start = True

    def __init__(self, client: Client, log: Callable[[str], None] = print):
        self.client, self.log = client, log
        self.run: Run | None = None
        """Set before the run begins."""
        self.round: Round | None = None
        self.base: dict[str, np.ndarray] = {}
        """Parameters of the version that the site trains from, f32 by path."""
        self.error: dict[str, np.ndarray] | None = None
        """Rounding errors of its updates, for the next one."""
        self._token_bound = 0
        self._dispatched: collections.deque[float] = collections.deque()
        """What each step whose metrics are not read yet trains on."""
        self._has_exchanged = False

    def on_begin(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> TrainState:
        """Join; a new site starts from the federation's version, one that resumes from its own."""
        run = self._run
        params = host_params(state.params)
        if EXTRA in extra:
            self.round = Round(**extra[EXTRA])
            self._read_base()
        elif step:
            raise ConfigError(
                f"{run.workdir} holds a run at step {step} that no federation has begun; use a new "
                "--workdir, with --config.init_from for its weights"
            )
        start = self.round.start if self.round else group_digests(params)
        facts = facts_of_run(run, state, self.client.site, start)
        self._token_bound = facts.token_bound
        welcome = self.client.join(facts, lambda: self._first_weights(params))
        if self.round is not None:
            if self.round.federation != welcome.federation:
                raise ConfigError(
                    f"{run.workdir} holds a site of another federation, {self.round.federation}, "
                    f"and this is {welcome.federation}; use a new --workdir"
                )
            self.log(
                f"goes on from version {self.round.version} of federation {welcome.federation}"
            )
            return state
        offer = self.client.fetch(-1)
        if offer is None:
            raise TrainingStopped("stopped while the site waited for its first version")
        if offer.is_last:
            raise ConfigError("the federation is over: there is nothing left to train")
        self.round = Round(offer.version, welcome.number, start, welcome.federation)
        self.log(f"starts from version {offer.version}")
        self._has_exchanged = True
        return self._adopt(step, state, params, offer)

    def _first_weights(self, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The parameters of version 0, which a federation that begins asks its first site for."""
        if self.round is not None:
            raise ConfigError(
                f"{self._run.workdir} holds a site of another federation, "
                f"{self.round.federation}, and the coordinator begins a new one; use a new "
                "--workdir, with --config.init_from for its weights"
            )
        return params

    def on_dispatch(self, batch: StepBatch, metrics: dict[str, Any]) -> None:
        """Note what the step trains on: the loss's own denominator, by which means add up."""
        rows = batch.given
        trained = rows.valid[:, 0] if isinstance(rows, Pairs) else rows.loss_weight
        self._dispatched.append(float(np.sum(trained, dtype=np.float64)))

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Count what the step has trained on."""
        trained = self._dispatched.popleft()
        if metrics["bad_in_a_row"] == 0:
            now = self._round
            now.steps += 1
            now.tokens += trained
            now.loss += metrics["loss"]
            now.token_lag = max(now.token_lag, int(metrics.get("cache/staleness_max", 0)))

    def exchanges(self, step: int) -> bool:
        """After each ``config.outer.steps`` steps, and after the last."""
        return step % self._run.config.outer.steps == 0 or step == self._run.steps

    def exchange(self, step: int, state: TrainState) -> Exchanged:
        """Send the update, and wait for the version to go on from."""
        if not self.exchanges(step):
            return Exchanged(state)
        now, local = self._round, host_params(state.params)
        try:
            if not now.steps:
                self.log(f"step {step}: no update is sent, as all steps since were skipped")
            else:
                self._send(step, local)
            offer = self.client.fetch(now.version)
        except Stopped:
            offer = None
        if offer is None:
            return Exchanged(state, "preempted")
        state = self._adopt(step, state, local, offer)
        self._has_exchanged = True
        if step == self._run.steps and not offer.is_last:
            raise TrainingStopped(
                f"the site's {step} steps are over, and the federation is at version "
                f"{offer.version} of {self._run.config.federate.rounds}: it lost rounds, or others "
                "are slower; start it again with a higher config.steps"
            )
        return Exchanged(state, "done" if offer.is_last else "")

    def on_save(self, step: int, state: TrainState, record: CheckpointRecord) -> None:
        """Keep the counts; a checkpoint after an exchange is complete before the next update."""
        record.extra[EXTRA] = dataclasses.asdict(self._round)
        record.is_awaited |= self._has_exchanged
        self._has_exchanged = False

    @property
    def _run(self) -> Run:
        assert self.run is not None
        return self.run

    @property
    def _round(self) -> Round:
        assert self.round is not None
        return self.round

    def _send(self, step: int, local: Mapping[str, np.ndarray]) -> None:
        now, outer = self._round, self._run.config.outer
        parts, error = codec.encode(local, self.base, outer.delta_dtype, self.error)
        update = Update(
            self.client.site, now.number + 1, now.version, now.tokens, now.steps,
            now.token_lag, now.loss / now.steps, parts,
        )  # fmt: skip
        verdict, why = self.client.submit(update)
        now.number = update.number
        if verdict == "duplicate":
            self.log(f"step {step}: an update counts once: {why}")
        elif verdict != "accepted":
            self.log(f"step {step}: the update is left out, as {verdict}: {why}")
        if verdict in ("accepted", "duplicate") and outer.error_feedback:
            self.error = error  # what was sent otherwise is lost, and what was owed is not
        now.refused = now.refused + 1 if verdict == "bad" else 0
        if now.refused >= _MAX_REFUSED:
            raise TrainingStopped(
                f"step {step}: the coordinator refused {now.refused} updates in a row: {why}"
            )

    def _adopt(
        self, step: int, state: TrainState, local: Mapping[str, np.ndarray], offer: Offer
    ) -> TrainState:
        """Go on from a version: its parameters, and older visual tokens where the encoder changed.

        The version is on disk before a checkpoint names it.

        Args:
            step: steps taken so far.
            state: after them.
            local: its trained parameters in host memory.
            offer: the version.
        """
        run, now = self._run, self._round
        passed = offer.version - now.version
        if offer.params is not None:
            self.base = offer.params
        self._check_base(offer)
        # Numbers go on where those of a lost workdir or an abandoned future ended: an update
        # with an old one would be a duplicate.
        number = max(now.number, offer.number)
        self.round = Round(
            offer.version, number, now.start, now.federation, step, refused=now.refused
        )
        self._write_base()
        state = run.training.with_trained(state, self.base, self._token_updates(local, passed))
        if run.config.outer.moments == "reset":
            state = state._replace(opt_state=reset_moments(state.opt_state))
        return state

    def _token_updates(self, local: Mapping[str, np.ndarray], passed: int) -> int:
        """By how many updates of the vision encoder a version makes cached tokens older.

        Args:
            local: the parameters that the site had.
            passed: outer updates since the version that it trained from.
        """
        how = self._run.config.federate.cache_invalidation
        vision = [path for path in local if is_vision_path(path)]
        same = messages.digest_of(local, vision) == messages.digest_of(self.base, vision)
        if same and (how == "digest" or not passed):
            return 0
        return self._token_bound + 1 if how == "flush" else max(passed, 1)

    def _check_base(self, offer: Offer) -> None:
        if group_digests(self.base) != offer.digests:
            raise TrainingStopped(
                f"the parameters of version {offer.version} are not those that the coordinator "
                "describes; start the site again, and look at the coordinator's folder if that "
                "happens again"
            )

    def _base_file(self) -> pathlib.Path:
        """The file of the version that the site trains from, by the step of the exchange."""
        assert self._run.workdir is not None
        return self._run.workdir / EXTRA / f"base-{self._round.step}.safetensors"

    def _write_base(self) -> None:
        """Write the version and the rounding errors; files that no checkpoint needs are removed."""
        path = self._base_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {_PARAM + name: x for name, x in self.base.items()}
        arrays |= {_ERROR + name: x for name, x in (self.error or {}).items()}
        self._round.base = messages.digest_of(arrays)
        run_record.write_whole(path, messages.save(arrays))
        files = sorted(path.parent.glob("base-*.safetensors"), key=_step_of)
        for old in files[: -(self._run.config.checkpoint.keep + 2)]:
            old.unlink()

    def _read_base(self) -> None:
        path = self._base_file()
        try:
            arrays = messages.load(path.read_bytes())
            if messages.digest_of(arrays) != self._round.base:
                raise ValueError("its digest is not the one that the checkpoint names")
        except Exception as error:  # whatever damage can raise
            raise ConfigError(
                f"{path}, the version that the site trains from, can't be read: {error}; start it "
                "in a new --workdir"
            ) from None
        self.base = {n.removeprefix(_PARAM): x for n, x in arrays.items() if n.startswith(_PARAM)}
        errors = {n.removeprefix(_ERROR): x for n, x in arrays.items() if n.startswith(_ERROR)}
        self.error = errors or None


def _step_of(path: pathlib.Path) -> int:
    return int(path.stem.removeprefix("base-"))
