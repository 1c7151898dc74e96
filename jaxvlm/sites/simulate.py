"""A federation in one process: a coordinator, and sites in threads that take turns."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, from_config_dict
from jaxvlm.data.errors import DataError, TooFewRecords
from jaxvlm.federate import messages
from jaxvlm.federate.client import Client, Stopped
from jaxvlm.federate.files import Folder
from jaxvlm.federate.handshake import read_settings
from jaxvlm.federate.service import Service
from jaxvlm.sites.simulated_data import SimulatedData
from jaxvlm.sites.site import make_site, site_config
from jaxvlm.sites.turns import Turns
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer.trainer import Trainer

_REFUSED = (ConfigError, DataError, TrainingStopped)


@dataclasses.dataclass
class Simulation:
    """A simulated federation.

    Args:
        config: the federation's recipe; without ``data``, its ``data.train`` is divided.
        workdir: holds the coordinator's folder, each site's and its data.
        alpha: of the Dirichlet distribution that divides the data; infinity divides them alike.
        data: files of the sites' training data, instead of dividing one.
        seconds: virtual seconds that a train step takes at each site; 1 where there are fewer.
        log: takes lines for people.
        wrap: replaces a site's way to the coordinator, in tests: (site, call) -> call.
    """

    config: Any
    workdir: pathlib.Path
    alpha: float = float("inf")
    data: Sequence[str] = ()
    seconds: Sequence[float] = ()
    log: Callable[[str], None] = print
    wrap: Callable[[str, Callable[[bytes], bytes]], Callable[[bytes], bytes]] = lambda site, call: (
        call
    )

    def __post_init__(self) -> None:
        self.config = from_config_dict(self.config)
        site_config(self.config, log=lambda line: None)  # refuses what no site can use
        count = self.config.federate.sites
        if self.data and len(self.data) != count:
            raise ConfigError(
                f"{len(self.data)} files of data for config.federate.sites={count}; give one each"
            )
        if len(self.seconds) > count:
            raise ConfigError(f"{len(self.seconds)} step times for {count} sites; give one each")
        self.names = [f"site-{i}" for i in range(count)]
        self.sites: dict[str, Trainer] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self._turns = Turns(self.names)
        self._met: set[str] = set()
        """Sites that have waited for the others before they join."""
        self._errors: list[BaseException] = []

    def run(self) -> dict[str, Any]:
        """Run the federation to its end; one that is in the folder goes on.

        Returns:
            ``version``, ``sites`` by name, ``virtual_seconds``, and the first site's evaluation.

        Raises:
            ConfigError, DataError, TrainingStopped: what a site raised.
        """
        has_begun = self._check_workdir()
        made = SimulatedData(self.workdir / "data", has_begun, self.log)
        configs = made.site_configs(self.config, self.names, self.alpha, self.data)
        self.service = Service(
            self.config, self.workdir / "coordinator", self.log, clock=self._turns.now
        )
        # All are built before the first one joins: where one can't be, nothing has begun.
        for name, config in zip(self.names, configs, strict=True):
            self.sites[name] = self._built(name, config)
        threads = [
            threading.Thread(target=self._run_site, args=(name,), daemon=True)
            for name in self.names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        state = self.service.state
        assert state is not None
        shown = {name: dataclasses.asdict(record) for name, record in state.sites.items()}
        result = {"version": state.version, "sites": shown}
        result |= {"virtual_seconds": round(self._turns.latest, 3)}
        return self.results[self.names[0]] | result

    def _check_workdir(self) -> bool:
        """Refuse a folder of something else; whether a federation in it has weights already."""
        if run_record.is_begun(self.workdir) or run_record.has_checkpoint(self.workdir):
            raise ConfigError(
                f"--workdir={self.workdir} holds a training run; use a new folder for the "
                "simulation"
            )
        if Folder(self.workdir).federation() is not None:
            raise ConfigError(
                f"--workdir={self.workdir} holds a coordinator of `jaxvlm federate serve`; use a "
                "new folder for the simulation"
            )
        found = Folder(self.workdir / "coordinator").federation()
        rounds = read_settings(found["settings"])[0].rounds if found else 0
        if found and rounds != self.config.federate.rounds:
            raise ConfigError(
                f"{self.workdir} holds a federation of {rounds} rounds, and "
                f"config.federate.rounds={self.config.federate.rounds}: restore it, or, to train "
                "on from its weights, use a new --workdir with "
                f"--config.init_from={self.workdir / self.names[0]}"
            )
        sites = (self.workdir / name for name in self.names)
        return found is not None or any(map(run_record.has_checkpoint, sites))

    def _built(self, name: str, config: Config) -> Trainer:
        """A site's run; what can't be used is refused by its name."""
        client = Client(
            name,
            self.wrap(name, lambda data: self._call(name, data)),
            is_stopped=lambda: bool(self._errors),
            sleep=lambda s: self._turns.wait_for_others(name, s),
        )
        try:
            return make_site(config, self.workdir / name, client, log=self.log, name=name)
        except TooFewRecords as error:
            even = "" if self.data else "lower --config.federate.sites, raise --alpha, or "
            raise DataError(
                f"{name}: {error.found}, which all simulated sites share; lower it to "
                f"{error.most} or less (the mesh axes data and fsdp have to divide it), {even}give "
                "the site more records"
            ) from None
        except _REFUSED as error:
            raise _of_site(name, error) from None

    def _call(self, name: str, data: bytes) -> bytes:
        """A site's way to the coordinator, in its turn."""
        message = messages.unpack(data)
        if message.kind == "join" and name not in self._met:
            self._met.add(name)
            self._turns.meet(name)
            if self._errors:
                raise Stopped("another site could not start")
        seconds = dict(zip(self.names, self.seconds)).get(name, 1.0)
        self._turns.take(name, seconds * message.head["steps"] if message.kind == "submit" else 0.0)
        return self.service.handle(data)

    def _run_site(self, name: str) -> None:
        try:
            self._turns.take(name)
            self.results[name] = self.sites[name].fit()
        except _REFUSED as error:
            self._errors.append(_of_site(name, error))
        except BaseException as error:  # raised where the simulation is waited for
            self._errors.append(error)
        finally:
            self._turns.leave(name)


def _of_site(name: str, error: Exception) -> Exception:
    """An error with a site's name in front; never of a subclass, which may want other arguments."""
    kind = next(kind for kind in _REFUSED if isinstance(error, kind))
    return kind(f"{name}: {error}")
