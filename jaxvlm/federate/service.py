"""The coordinator as a service: answers sites' messages, and keeps its state on disk.

A transport brings it bytes and carries its answer back, and knows nothing else: there are three
calls, *join*, *fetch* and *submit*.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxvlm.config import Config, ConfigError, changes
from jaxvlm.federate import coordinator, handshake, messages, privacy
from jaxvlm.federate.coordinator import Plan, State
from jaxvlm.federate.files import Folder
from jaxvlm.federate.messages import Message, MessageError

POLL_S = 2.0
"""Seconds after which a site that waits for the next version asks again."""


class Service:
    """A coordinator in a folder.

    Args:
        config: its ``federate`` and ``outer`` are the federation's.
        workdir: the coordinator's folder; a federation that is in it goes on.
        log: takes lines for people.
        clock: seconds, for ``federate.deadline_s``.

    Raises:
        ConfigError: settings that can't be used, or that differ from those of the folder.
    """

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        handshake.check_settings(config)
        self._log, self._clock, self._lock = log, clock, threading.Lock()
        self.folder = Folder(workdir)
        self.state: State | None = None
        """``None`` until the first site has joined."""
        self.bytes: dict[str, list[int]] = {}
        """Site -> bytes of its messages, and of the answers."""
        self._sessions: dict[str, str] = {}
        self._facts: dict[str, Any] = {}
        self._first_at: float | None = None
        self._digests: tuple[int, str, dict[str, str]] = (-1, "", {})
        self._config = config
        self._settings = handshake.settings_of(config)
        self.plan = Plan(config.federate, config.outer)
        self._federation = self._open()

    @property
    def is_over(self) -> bool:
        """Whether every site that joined has been given the last version."""
        state = self.state
        if state is None or not coordinator.is_over(self.plan, state):
            return False
        return all(x.held >= state.version for x in state.sites.values())

    def handle(self, data: bytes) -> bytes:
        """Answer one message of a site; a message that can't be used is refused by name."""
        with self._lock:
            try:
                message = messages.unpack(data)
                site = message.head.get("site")
                if not isinstance(site, str) or not 0 < len(site) <= 200 or not site.isprintable():
                    raise MessageError(f"a message of a site named {site!r}")
                answers = {"join": self._join, "fetch": self._fetch, "submit": self._submit}
                if message.kind not in answers:
                    raise MessageError(f"a message of the kind {message.kind!r}")
                answer = self._counted(site, message, len(data), answers[message.kind])
            except ConfigError as error:
                self._note({"event": "refused", "why": str(error)}, f"refused: {error}")
                return messages.pack("refused", {"why": str(error)})
            self.bytes[site][1] += len(answer)
            return answer

    def _counted(
        self, site: str, message: Message, size: int, answer: Callable[[str, Message], bytes]
    ) -> bytes:
        """Answer a message whose bytes count before a version that it completes notes them."""
        before = self.bytes.get(site)
        sent, received = before or (0, 0)
        self.bytes[site] = [sent + size, received]
        try:
            return answer(site, message)
        except ConfigError:
            del self.bytes[site]
            if before is not None:
                self.bytes[site] = before
            raise

    def tick(self) -> None:
        """Make the next version where the buffer is full, or its deadline has passed."""
        with self._lock:
            self._apply_if_due()

    def _open(self) -> dict[str, Any] | None:
        found = self.folder.federation()
        if found is None:
            return None
        if found["settings"] != self._settings:
            old, new = handshake.read_settings(found["settings"]), self.plan
            raise ConfigError(
                f"{self.folder.path} holds a federation with other settings: "
                f"{_first_change(old, (new.federate, new.outer))}; restore them, or use empty "
                "folders and go on from a site's weights with --config.init_from"
            )
        self._facts = found["facts"]
        self.plan = dataclasses.replace(self.plan, stacked=found["facts"]["stacked"])
        self.state, more = self.folder.load(self.plan)
        self._sessions, self.bytes = more["sessions"], more["bytes"]
        self.plan = dataclasses.replace(self.plan, token_bounds=more["token_bounds"])
        self._first_at = self._clock() if self.state.buffer else None
        self._log(
            f"resuming at version {self.state.version} of {self.plan.federate.rounds}, "
            f"{len(self.state.buffer)} updates wait"
        )
        return found

    def _join(self, site: str, message: Message) -> bytes:
        """Let a site in, or refuse it; the first one brings the weights of version 0."""
        facts = handshake.facts_of(message.head.get("facts"))
        handshake.refuse_other_settings(facts, self._config)
        first = handshake.facts_of(self._facts) if self._facts else facts
        if why := handshake.differences(facts, first):
            raise ConfigError(f"site {site} can't join: {'; '.join(why)}")
        sites = self.state.sites if self.state else {}
        if site not in sites and len(sites) >= self.plan.federate.sites:
            raise ConfigError(
                f"site {site} can't join: the federation has its "
                f"{self.plan.federate.sites} sites, {', '.join(sorted(sites))}"
            )
        if self.state is None and not message.arrays:
            return messages.pack("welcome", {"needs_weights": True})
        if self.state is None:
            self._begin(facts, message)
        assert self.state is not None
        self._sessions[site] = secrets.token_hex(8)
        bounds = {**self.plan.token_bounds, site: facts.token_bound}
        self.plan = dataclasses.replace(self.plan, token_bounds=bounds)
        record = self.state.sites.get(site, coordinator.SiteRecord())
        self.state = self.state._replace(sites=self.state.sites | {site: record})
        self._commit()
        line = f"site {site} joined: {', '.join(f'{k} {v}' for k, v in facts.about.items())}"
        self._note({"event": "joined", "site": site, "about": facts.about}, line)
        assert self._federation is not None
        head = {
            "needs_weights": False,
            "federation": self._federation["id"],
            "session": self._sessions[site],
            "number": record.number,
        }
        return messages.pack("welcome", head)

    def _begin(self, facts: handshake.Facts, message: Message) -> None:
        """Start a federation from the weights that its first site brings."""
        digests = messages.group_digests(message.arrays)
        if digests != facts.common.get("start"):
            raise ConfigError(f"site {facts.site}: its weights are not those that it described")
        self._facts = dataclasses.asdict(facts)
        self.plan = dataclasses.replace(self.plan, stacked=facts.stacked)
        self.state = coordinator.init(self.plan, dict(message.arrays))
        self._federation = {
            "id": secrets.token_hex(8),
            "secret": secrets.token_hex(16),  # of the noise; sites never see it
            "settings": self._settings,
            "facts": self._facts,
        }
        self.folder.prepare()
        self.folder.save_version(self.state)
        self._commit()
        self.folder.begin(self._federation)

    def _fetch(self, site: str, message: Message) -> bytes:
        """Give a site the current version, or tell it to wait for the next."""
        self._check(site, message)
        self._apply_if_due()
        state = self._known()
        have = message.head.get("have")
        if not isinstance(have, int):
            raise MessageError(f"site {site} asks for weights and has version {have!r}")
        if have > state.version:
            raise ConfigError(
                f"site {site} has version {have}, and the coordinator is at {state.version}: its "
                "folder was restored from an older copy; restore the newest one"
            )
        over = coordinator.is_over(self.plan, state)
        waits = any(x.update.site == site for x in state.buffer)
        if not over and waits and self.plan.buffer == self.plan.federate.sites:
            return messages.pack("wait", {"version": state.version, "poll_s": POLL_S})
        self.state = coordinator.offer(state, site)
        self._commit()
        head = {
            "version": state.version,
            "digests": self._version_digests()[2],
            "number": state.sites[site].number,
        }
        kind = "done" if over else "weights"
        return messages.pack(kind, head, {} if have == state.version else state.params)

    def _submit(self, site: str, message: Message) -> bytes:
        """Judge a site's update; one that is accepted is on disk before the answer is."""
        self._check(site, message)
        update = messages.unpack_update(message)
        self._apply_if_due()  # an update that comes after the deadline is late
        state, verdict = coordinator.receive(self.plan, self._known(), update)
        if verdict.kind == "accepted":
            self.folder.save_update(update)
            self._first_at = self._clock() if self._first_at is None else self._first_at
        self.state = state
        record = {
            "event": "update",
            "site": site,
            "number": update.number,
            "verdict": verdict.kind,
            "why": verdict.why,
            "base": update.base,
            "version": state.version,
            "tokens": update.tokens,
            "steps": update.steps,
            "loss": update.loss if math.isfinite(update.loss) else None,
            "token_lag": update.token_lag,
        }
        line = f"update {update.number} of {site}: {verdict.kind}"
        self._note(record, f"{line}: {verdict.why}" if verdict.why else "")
        self._commit()
        self._apply_if_due()
        return messages.pack("verdict", {"verdict": verdict.kind, "why": verdict.why})

    def _apply_if_due(self) -> None:
        state = self.state
        if state is None:
            return
        waited = 0.0 if self._first_at is None else self._clock() - self._first_at
        if not coordinator.is_due(self.plan, state, waited):
            return
        assert self._federation is not None
        secret = bytes.fromhex(self._federation["secret"])
        new, applied = coordinator.apply(self.plan, state, secret)
        if not applied.finite:
            self._drop(state, new, applied)
            return
        self.folder.save_version(new)
        record = {"event": "version", **applied._asdict(), "time": time.time()}
        record["bytes"] = {site: list(count) for site, count in self.bytes.items()}
        missing = coordinator.left_out(state)
        record["left_out"] = missing if len(state.buffer) < self.plan.buffer else []
        line = f"version {new.version}: {', '.join(applied.sites)}, loss {applied.loss:.4f}"
        if record["left_out"]:
            line += f"; left out after the deadline: {', '.join(missing)}"
        if self.plan.federate.noise_multiplier:
            record["epsilon"] = privacy.epsilon(self.plan.federate, new.version)
            line += f"; epsilon {record['epsilon']:.3g}"
        if applied.lora_lost:
            line += f"; {applied.lora_lost:.2g} of the adapters' mean is beyond their rank"
        self._note(record, line)
        self.state, self._first_at = new, None
        self._commit()
        self.folder.forget(state, new)

    def _drop(self, state: State, new: State, applied: coordinator.Applied) -> None:
        """Go on without a buffer that would have made parameters that are not finite."""
        names = ", ".join(applied.sites)
        line = f"version {state.version} stays: with the updates of {names} it would not be finite"
        self._note({"event": "dropped", "version": state.version, "sites": applied.sites}, line)
        self.state, self._first_at = new, None
        self._commit()
        for x in state.buffer:
            self.folder.remove_update(x.update)

    def _check(self, site: str, message: Message) -> None:
        """Refuse a site that has not joined, or whose name another process has taken since."""
        if self.state is None or site not in self._sessions:
            raise ConfigError(f"site {site} has not joined; start it again")
        if message.head.get("session") != self._sessions[site]:
            raise ConfigError(
                f"site {site} was joined by another process with the same name; stop one of them"
            )

    def _known(self) -> State:
        assert self.state is not None
        return self.state

    def _commit(self) -> None:
        bounds = dict(self.plan.token_bounds)
        more = {"sessions": self._sessions, "bytes": self.bytes, "token_bounds": bounds}
        self.folder.commit(self._known(), self._version_digests()[1], more)

    def _version_digests(self) -> tuple[int, str, dict[str, str]]:
        """The version, the digest of its parameters, and those of each submodel's."""
        state = self._known()
        if self._digests[0] != state.version:
            groups = messages.group_digests(state.params)
            self._digests = state.version, messages.digest_of(state.params), groups
        return self._digests

    def _note(self, record: dict[str, Any], line: str) -> None:
        if self.folder.path.is_dir():
            self.folder.log(record)
        if line:
            self._log(line)


def _first_change(old: Any, new: Any) -> str:
    for name, a, b in zip(("config.federate", "config.outer"), old, new):
        for line in changes(a, b, name):
            return line
    return "a setting"
