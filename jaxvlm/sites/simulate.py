"""A federation in one process: a coordinator, and sites in threads that take turns."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxvlm.config import Config, ConfigError, from_config_dict
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.run_data import read_records
from jaxvlm.data.errors import DataError
from jaxvlm.federate import handshake, messages
from jaxvlm.federate.service import Service
from jaxvlm.hf.run_processor import make_tokenizer
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.sites import partition
from jaxvlm.sites.callback import FederationCallback
from jaxvlm.sites.site import make_site
from jaxvlm.sites.turns import Turns
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer.trainer import Trainer


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
        handshake.check_settings(self.config)
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
        self._errors: list[BaseException] = []

    def run(self) -> dict[str, Any]:
        """Run the federation to its end; one that is in the folder goes on.

        Returns:
            ``version``, ``sites`` by name, ``virtual_seconds``, and the first site's evaluation.

        Raises:
            ConfigError, DataError, TrainingStopped: what a site raised.
        """
        configs = self._site_configs()
        self.service = Service(
            self.config, self.workdir / "coordinator", self.log, clock=self._turns.now
        )
        threads = [
            threading.Thread(target=self._run_site, args=(name, i, configs[i]), daemon=True)
            for i, name in enumerate(self.names)
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
        result |= {"virtual_seconds": self._turns.latest}
        return self.results[self.names[0]] | result

    def _run_site(self, name: str, index: int, config: Config) -> None:
        seconds = self.seconds[index] if index < len(self.seconds) else 1.0

        def call(data: bytes) -> bytes:
            message = messages.unpack(data)
            spent = seconds * message.head["steps"] if message.kind == "submit" else 0.0
            self._turns.take(name, spent)
            return self.service.handle(data)

        try:
            self._turns.take(name)
            own = self.wrap(name, call)
            site = make_site(config, self.workdir / name, name, own, log=self.log)
            for callback in site.callbacks:
                if isinstance(callback, FederationCallback):
                    callback.client.sleep = lambda s: self._turns.wait_for_others(name, s)
                    callback.client.is_stopped = lambda: bool(self._errors)
            self.sites[name] = site
            self.results[name] = site.fit()
        except (ConfigError, DataError, TrainingStopped) as error:
            self._errors.append(type(error)(f"{name}: {error}"))
        except BaseException as error:  # raised where the simulation is waited for
            self._errors.append(error)
        finally:
            self._turns.leave(name)

    def _site_configs(self) -> list[Config]:
        """Each site's recipe: its data, one tokenizer, and the evaluation at the first alone."""
        config, files = self.config, list(self.data)
        if trains_embeddings(config):
            if not files:
                raise ConfigError(
                    "pairs are not divided among sites: give each its file, --site_data=FILE,…"
                )
        else:
            config, files = self._conversations(config, files)
        configs = [
            dataclasses.replace(config, data=dataclasses.replace(config.data, train=file))
            for file in files
        ]
        return [configs[0], *map(_quiet, configs[1:])]

    def _conversations(self, config: Config, files: list[str]) -> tuple[Config, list[str]]:
        """Divide the data where no files are given, and build the tokenizer that all sites have."""
        folder = self.workdir / "data"
        specs = files or [config.data.train]
        records = [r for spec in specs for r in read_records(config.data, spec)[0]]
        if not files and config.data.format.target and config.data.eval:
            raise ConfigError(
                "data of a format of your own are divided into files of another, in which "
                "config.data.eval is not; give each site its file, --site_data=FILE,…"
            )
        if not files:
            count, seed = config.federate.sites, config.seed
            divided = partition.partition(records, count, self.alpha, seed)
            files = [str(folder / f"{name}.jsonl") for name in self.names]
            for file, indices in zip(files, divided, strict=True):
                partition.write_records([records[i] for i in indices], pathlib.Path(file))
            self.log("; ".join(f"{n}: {len(x)} records" for n, x in zip(self.names, divided)))
            # They are written with whole paths, in one of the formats that are read by themselves.
            fields = dataclasses.replace(config.data, format=type(config.data.format)())
            config = dataclasses.replace(config, data=fields)
        if config.tokenizer.path or config.model.checkpoint or config.init_from:
            return config, files
        made = make_tokenizer(config, folder / "tokenizer", lambda: tokenize.texts(records))
        if not (folder / "tokenizer").is_dir():
            made.save(folder / "tokenizer")
        tokenizer = type(config.tokenizer)(path=str(folder / "tokenizer"))
        return dataclasses.replace(config, tokenizer=tokenizer), files


def _quiet(config: Config) -> Config:
    """The recipe of a site that leaves evaluation, and lines on the way, to the first one."""
    return dataclasses.replace(
        config,
        log_every=config.steps or config.log_every,
        data=dataclasses.replace(config.data, eval=""),
        eval_every=0,
        eval_records=0,
        checkpoint=dataclasses.replace(config.checkpoint, metric="", mode="max"),
    )
