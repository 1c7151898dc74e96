"""The data of simulated sites, and one tokenizer of all their texts, in ``WORKDIR/data``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, Extension, TokenizerConfig, json_text
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.sources import conversation_formats, pair_formats
from jaxvlm.hf.run_processor import make_tokenizer
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.sites import partition
from jaxvlm.trainer import embedding_run

_RECORD = "made_of.json"


class SimulatedData:
    """Makes the sites' files and tokenizer, and compares them with those of an earlier start.

    Args:
        folder: that they are in.
        has_begun: whether a site or the coordinator has weights, which belong to them.
        log: takes lines for people.
    """

    def __init__(self, folder: pathlib.Path, has_begun: bool, log: Callable[[str], None]):
        self._folder, self._has_begun, self._log = folder, has_begun, log
        self._old, self._new = _read(folder / _RECORD), dict[str, Any]()

    def site_configs(
        self, config: Config, names: Sequence[str], alpha: float, files: Sequence[str]
    ) -> list[Config]:
        """Each site's recipe: its data, one tokenizer, and the evaluation at the first alone.

        Args:
            config: the federation's.
            names: of the sites.
            alpha: of the division of ``data.train``.
            files: the sites' own, in place of one that is divided; or none.

        Raises:
            ConfigError: there are no data, or a site has begun with others.
            DataError: a file that can't be used.
        """
        if not all(files):
            raise ConfigError("--site_data has an empty name; give each site its file")
        if not files:
            config, files = self._divided(config, names, alpha)
        config = self._with_tokenizer(config, files)
        if not self._has_begun and self._new:
            run_record.write_whole(self._folder / _RECORD, json.dumps(self._new, indent=1) + "\n")
        configs = [
            dataclasses.replace(config, data=dataclasses.replace(config.data, train=file))
            for file in files
        ]
        return [configs[0], *map(_quiet, configs[1:])]

    def _divided(
        self, config: Config, names: Sequence[str], alpha: float
    ) -> tuple[Config, list[str]]:
        """Divide the training data; the recipe that reads the sites' files, and their names."""
        if trains_embeddings(config):
            raise ConfigError(
                "pairs are not divided among sites: give each its file, --site_data=FILE,…"
            )
        if config.data.mixture:
            raise ConfigError(
                "config.data.mixture is not divided among sites; name one file in "
                "config.data.train, or give each site its own, --site_data=FILE,…, and leave the "
                "mixture out"
            )
        if not config.data.train:
            raise ConfigError(
                "a simulation needs data: --config.data.train=FILE, which is divided among the "
                "sites, or --site_data=FILE,… with one for each"
            )
        if config.data.format.target and config.data.eval:
            raise ConfigError(
                "data of a format of your own are divided into files of another, in which "
                "config.data.eval is not; give each site its file, --site_data=FILE,…"
            )
        records = conversation_formats.read(config.data.train, config.data)[0]
        divided = partition.partition(records, len(names), alpha, config.seed)
        contents = [partition.json_lines([records[i] for i in part]) for part in divided]
        settings = {
            "config.data.train": config.data.train,
            "config.federate.sites": len(names),
            "config.seed": config.seed,
            "--alpha": f"{alpha:g}",
        }
        self._is_same("the division of data.train", contents, settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        files = [self._folder / f"{name}.jsonl" for name in names]
        for file, content in zip(files, contents, strict=True):
            run_record.write_whole(file, content)
        self._log("; ".join(f"{n}: {len(x)} records" for n, x in zip(names, divided)))
        # They are written with whole paths, in one of the formats that are read by themselves.
        data = dataclasses.replace(config.data, format=Extension())
        return dataclasses.replace(config, data=data), list(map(str, files))

    def _with_tokenizer(self, config: Config, files: Sequence[str]) -> Config:
        """The recipe with a tokenizer of all sites' texts, where none is named."""
        given = config.tokenizer.path or config.init_from or config.network.checkpoint
        if given or (config.embedder == "dual" and config.dual.text_checkpoint):
            return config
        texts, folder = list(_texts(config, files)), self._folder / "tokenizer"
        settings = {f"config.tokenizer.{k}": v for k, v in vars(config.tokenizer).items()}
        parts = (f"{x}\n".encode() for x in (settings, *map(repr, texts)))
        if not self._is_same("the tokenizer", parts, settings) or not folder.is_dir():
            # Whole or not at all: a kill in the middle must not leave half a tokenizer.
            half = folder.with_suffix(".tmp")
            shutil.rmtree(half, ignore_errors=True)
            make_tokenizer(config, None, lambda: texts).save(half)
            shutil.rmtree(folder, ignore_errors=True)
            half.rename(folder)
        return dataclasses.replace(config, tokenizer=TokenizerConfig(path=str(folder)))

    def _is_same(self, what: str, parts: Iterable[bytes], settings: Mapping[str, Any]) -> bool:
        """Whether an earlier start made the same thing; it is noted for the next one.

        Args:
            what: its name in messages.
            parts: what says it all.
            settings: that it depends on, which are named where it is another.

        Raises:
            ConfigError: it is another, and a site has begun.
        """
        sums = hashlib.blake2b(digest_size=16)
        for part in parts:
            sums.update(hashlib.blake2b(part, digest_size=16).digest())
        self._new[what] = {"digest": sums.hexdigest(), **settings}
        old = self._old.get(what)
        if old and old.get("digest") == sums.hexdigest():
            return True
        changed = [
            f"{name} was {old.get(name)!r} and is {value!r}"
            for name, value in settings.items()
            if old and old.get(name) != value
        ]
        why = ", ".join(changed) or ("the texts or images changed" if old else "no record of it")
        if self._has_begun:
            raise ConfigError(
                f"{self._folder.parent}: sites have begun, and {what} would be another ({why}); "
                "restore what changed, or use an empty --workdir"
            )
        if old:
            self._log(f"{self._folder}: {what} of an earlier start is replaced ({why})")
        return False


def _read(path: pathlib.Path) -> dict[str, Any]:
    """What an earlier start made; {} where there was none, or its record is damaged."""
    try:
        found = json_text.read(path) if path.is_file() else {}
    except ValueError:
        return {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if type(found) is dict else {}


def _texts(config: Config, files: Sequence[str]) -> Iterator[str]:
    for file in files:
        if trains_embeddings(config):
            yield from embedding_run.texts(pair_formats.read(file, config.data)[0])
        else:
            yield from tokenize.texts(conversation_formats.read(file, config.data)[0])


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
