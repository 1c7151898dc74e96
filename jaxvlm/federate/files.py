"""The coordinator's folder: what it needs to go on after a kill at any moment, to the same bits.

``federation.json`` says what the federation is, ``versions/N.safetensors`` holds version N with the
outer optimizer's state, ``updates/`` the accepted updates that wait for theirs, and ``table.json``
is the commit: it names the version and the updates that count. An update is on disk before it is
acknowledged, and a version before it is offered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError, json_text
from jaxvlm.federate import messages
from jaxvlm.federate.coordinator import Buffered, Plan, SiteRecord, State
from jaxvlm.federate.messages import Update
from jaxvlm.optim import outer

_PARAM, _OUTER = "params/", "outer/"
_KEPT = 2
"""Versions whose files stay."""


class Folder:
    """Reads and writes a coordinator's folder."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.log_file = path / "coordinator.jsonl"

    def federation(self) -> dict[str, Any] | None:
        """What the federation is; ``None``: none has begun here."""
        return self._json("federation.json")

    def prepare(self) -> None:
        """Create the folders."""
        for name in ("versions", "updates"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def begin(self, federation: dict[str, Any]) -> None:
        """Write what the federation is; from now on it goes on from what is committed."""
        self._write("federation.json", federation)

    def commit(self, state: State, digest: str, more: dict[str, Any]) -> None:
        """Write which version and which updates count, and the table of sites.

        Args:
            state: whose version and updates are on disk.
            digest: of the version's parameters.
            more: JSON values that are kept with it.
        """
        table = {
            "version": state.version,
            "digest": digest,
            "buffer": [[x.update.site, x.update.number, x.lag] for x in state.buffer],
            "sites": {site: dataclasses.asdict(x) for site, x in state.sites.items()},
            **more,
        }
        self._write("table.json", table)

    def save_version(self, state: State) -> None:
        """Write a version with its outer optimizer's state."""
        leaves = jax.tree.leaves(state.outer)
        arrays = {_PARAM + path: x for path, x in state.params.items()}
        arrays |= {f"{_OUTER}{i}": np.asarray(x) for i, x in enumerate(leaves)}
        path = self.path / "versions" / f"{state.version}.safetensors"
        run_record.write_whole(path, messages.save(arrays))

    def save_update(self, update: Update) -> None:
        """Write an accepted update."""
        path = self._update_file(update.site, update.number)
        run_record.write_whole(path, messages.pack_update(update, ""))

    def remove_update(self, update: Update) -> None:
        """Remove an update that counts no more."""
        self._update_file(update.site, update.number).unlink(missing_ok=True)

    def forget(self, old: State, new: State) -> None:
        """Remove the updates that a version was made of, and versions before the last ones."""
        for x in old.buffer:
            self.remove_update(x.update)
        stale = new.version - _KEPT
        if stale >= 0:
            (self.path / "versions" / f"{stale}.safetensors").unlink(missing_ok=True)

    def load(self, plan: Plan) -> tuple[State, dict[str, Any]]:
        """The state that was committed last, and the JSON values that were kept with it.

        Raises:
            ConfigError: a file is missing or damaged; the message names it.
        """
        table = self._json("table.json")
        if table is None:
            raise ConfigError(
                f"{self.path} holds federation.json, and no table.json: restore the folder from a "
                "copy, or start the federation again in an empty one"
            )
        version = self.path / "versions" / f"{table['version']}.safetensors"
        try:
            arrays = messages.load(version.read_bytes())
        except Exception as error:  # whatever damage can raise
            raise ConfigError(
                f"{version} is missing or damaged ({type(error).__name__}: {error}); restore it "
                "from a copy: sites hold its weights in federate/ of their workdirs"
            ) from None
        params = {n.removeprefix(_PARAM): x for n, x in arrays.items() if n.startswith(_PARAM)}
        if messages.digest_of(params) != table["digest"]:
            raise ConfigError(f"{version} is damaged: its digest differs from table.json's")
        empty = outer.make_outer_optimizer(plan.outer).init(params)
        leaves = [arrays[f"{_OUTER}{i}"] for i in range(len(jax.tree.leaves(empty)))]
        outer_state = jax.tree.unflatten(jax.tree.structure(empty), leaves)
        buffer = tuple(Buffered(self._update(site, n), lag) for site, n, lag in table["buffer"])
        sites = {site: SiteRecord(**values) for site, values in table["sites"].items()}
        return State(table["version"], params, outer_state, buffer, sites), table

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to ``coordinator.jsonl``."""
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _update(self, site: str, number: int) -> Update:
        path = self._update_file(site, number)
        try:
            return messages.unpack_update(messages.unpack(path.read_bytes()))
        except (OSError, messages.MessageError) as error:
            raise ConfigError(
                f"{path}, an update that was acknowledged, can't be read: {error}; restore it from "
                "a copy"
            ) from None

    def _update_file(self, site: str, number: int) -> pathlib.Path:
        name = hashlib.blake2b(site.encode(), digest_size=8).hexdigest()  # a site's name is no path
        return self.path / "updates" / f"{name}-{number}.safetensors"

    def _json(self, name: str) -> Any:
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json_text.read(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore it from a copy") from None

    def _write(self, name: str, values: dict[str, Any]) -> None:
        run_record.write_whole(self.path / name, json.dumps(values, indent=1))
