"""A federation in one process: a coordinator, and sites in threads that take turns."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxvlm.config import Config, ConfigError, Extension, TokenizerConfig, from_config_dict
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.run_data import read_records
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import pair_formats
from jaxvlm.federate import handshake, messages
from jaxvlm.federate.client import Client
from jaxvlm.federate.service import Service
from jaxvlm.hf.run_processor import make_tokenizer
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.sites import partition
from jaxvlm.sites.site import make_site
from jaxvlm.sites.turns import Turns
from jaxvlm.train.loop import TrainingStopped
from jaxvlm.trainer import embedding_run
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
            client = Client(
                name,
                self.wrap(name, call),
                is_stopped=lambda: bool(self._errors),
                sleep=lambda s: self._turns.wait_for_others(name, s),
            )
            site = make_site(config, self.workdir / name, client, log=self.log)
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
        if not files:
            config, files = self._divided(config)
        config = self._with_tokenizer(config, files)
        configs = [
            dataclasses.replace(config, data=dataclasses.replace(config.data, train=file))
            for file in files
        ]
        return [configs[0], *map(_quiet, configs[1:])]

    def _divided(self, config: Config) -> tuple[Config, list[str]]:
        """Divide the training data; the recipe that reads the sites' files, and their names."""
        if trains_embeddings(config):
            raise ConfigError(
                "pairs are not divided among sites: give each its file, --site_data=FILE,…"
            )
        if config.data.format.target and config.data.eval:
            raise ConfigError(
                "data of a format of your own are divided into files of another, in which "
                "config.data.eval is not; give each site its file, --site_data=FILE,…"
            )
        records = read_records(config.data, config.data.train)[0]
        divided = partition.partition(records, len(self.names), self.alpha, config.seed)
        files = [str(self.workdir / "data" / f"{name}.jsonl") for name in self.names]
        for file, indices in zip(files, divided, strict=True):
            partition.write_records([records[i] for i in indices], pathlib.Path(file))
        self.log("; ".join(f"{n}: {len(x)} records" for n, x in zip(self.names, divided)))
        # They are written with whole paths, in one of the formats that are read by themselves.
        data = dataclasses.replace(config.data, format=Extension())
        return dataclasses.replace(config, data=data), files

    def _with_tokenizer(self, config: Config, files: list[str]) -> Config:
        """The recipe with a tokenizer of all sites' texts, where none is named."""
        given = config.tokenizer.path or config.init_from or config.network.checkpoint
        if given or (config.embedder == "dual" and config.dual.text_checkpoint):
            return config
        folder = self.workdir / "data" / "tokenizer"
        if not folder.is_dir():
            # Whole or not at all: a kill in the middle must not leave half a tokenizer.
            half = folder.with_suffix(".tmp")
            shutil.rmtree(half, ignore_errors=True)
            make_tokenizer(config, None, lambda: _texts(config, files)).save(half)
            half.rename(folder)
        return dataclasses.replace(config, tokenizer=TokenizerConfig(path=str(folder)))


def _texts(config: Config, files: list[str]) -> Iterator[str]:
    for file in files:
        if trains_embeddings(config):
            yield from embedding_run.texts(pair_formats.read(file, config.data)[0])
        else:
            yield from tokenize.texts(read_records(config.data, file)[0])


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
