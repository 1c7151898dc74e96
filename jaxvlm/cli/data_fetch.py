"""The command ``jaxvlm data fetch``, which keeps the images and videos at URLs in records."""

from __future__ import annotations

import json
import logging
import pathlib
import time
from collections.abc import Iterable
from typing import Any

from absl import flags

from jaxvlm.config import Config, ConfigError, DataConfig, from_config_dict
from jaxvlm.data import fetch
from jaxvlm.data.conversations import mixture_records
from jaxvlm.data.conversations.content import is_packed
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources import conversation_formats, fetched, pair_formats
from jaxvlm.losses.registry import trains_embeddings

_log = logging.getLogger(__name__)
_EVERY = 10.0  # seconds between two lines
_LISTED = 20  # hosts


def run(values: flags.FlagValues, spec: str = "") -> dict[str, Any]:
    """Fetch what the records of a file, or of a recipe's data, name by URL.

    Args:
        values: flags of ``data``.
        spec: file; "" is all data of the recipe.
    """
    if not values.output or "://" in values.output:
        raise ConfigError(
            "data fetch needs --output=FOLDER, of this machine: jaxvlm data fetch [FILE] "
            "[--config=RECIPE] --output=FOLDER --hosts=HOST,…"
        )
    for name in ("max_mb", "timeout_s", "requests"):
        if getattr(values, name) < 1:
            raise ConfigError(f"--{name}={getattr(values, name)}: must be at least 1")
    if values.config is None and not spec:
        raise ConfigError("data fetch needs a FILE, or a recipe that names data: --config=RECIPE")
    config = Config() if values.config is None else from_config_dict(values.config)
    folder = pathlib.Path(values.output).expanduser()
    urls, problems = _urls(config, spec, folder)
    if problems:
        print(f"{problems:,} records can't be read for other reasons; `data check` lists them")
    if not urls:
        hint = "; pairs are read with the --config of their recipe"
        hint *= problems > 0 and values.config is None
        print(f"no record that can be read names an image or a video by a URL{hint}")
        return {"fetched": 0, "kept": 0, "failed": {}, "exit_code": 1 if problems else 0}
    hosts = tuple(values.hosts)
    if wrong := [pattern for pattern in hosts if not fetch.is_pattern(pattern)]:
        raise ConfigError(
            f"--hosts={wrong[0]}: name a host, *.NAME for those below one, or * for all with "
            "public addresses, without http:// and without a port"
        )
    if not hosts:
        for host, count in list(fetch.hosts_of(urls).items())[:_LISTED]:
            print(f"{count:>9,}  {host}")
        raise ConfigError(
            f"{len(urls):,} URLs: name the hosts that may be asked, --hosts=a.com,*.b.org, or "
            "--hosts=* for all that have public addresses"
        )
    limits = fetch.Limits(hosts, values.max_mb * 2**20, values.timeout_s, values.requests)
    return _fetched(urls, folder, limits)


def _fetched(urls: dict[str, str], folder: pathlib.Path, limits: fetch.Limits) -> dict[str, Any]:
    """Fetch, say how it goes, and write what failed to ``failed.jsonl``."""
    last = time.monotonic()

    def said(done: int, failed: int) -> None:
        nonlocal last
        if time.monotonic() > last + _EVERY:
            _log.info("fetch: %d of %d files asked for, %d failed", done, len(urls), failed)
            last = time.monotonic()

    try:
        found = fetch.fetch(urls, folder, limits, said)
        lines = [json.dumps({"url": url, "reason": x}) + "\n" for url, x in found.failed.items()]
        (folder / "failed.jsonl").write_text("".join(lines), encoding="utf-8")
        paths = {url: fetched.path_of(folder, url).relative_to(folder) for url in urls}
        kept = [
            json.dumps({"url": url, "file": str(path)}) + "\n"
            for url, path in paths.items()
            if url not in found.failed
        ]
        (folder / "kept.jsonl").write_text("".join(kept), encoding="utf-8")
    except OSError as error:
        where = error.filename or folder
        raise DataError(f"{where} can't be written: {error.strerror or error}") from None
    reasons: dict[str, list[str]] = {}
    for url, reason in found.failed.items():
        reasons.setdefault(reason, []).append(url)
    for reason, own in sorted(reasons.items(), key=lambda x: -len(x[1])):
        more = ", ..." if len(own) > 3 else ""
        print(f"failed: {len(own):,}  {reason}: {', '.join(own[:3])}{more}")
    print(
        f"{folder}: {found.new:,} files fetched, {found.kept:,} were there, {len(found.failed):,} "
        f"failed; --config.data.fetched={folder}"
    )
    report = {"fetched": found.new, "kept": found.kept, "failed": reasons}
    return report | {"exit_code": 1 if found.failed else 0}


def _urls(config: Config, spec: str, folder: pathlib.Path) -> tuple[dict[str, str], int]:
    """URL -> ``an image`` or ``a video``; and how many records can't be read."""
    urls: dict[str, str] = {}

    def file_of(url: str, article: str) -> str:
        urls[url] = article
        return str(fetched.path_of(folder, url))

    reader: Any = pair_formats if trains_embeddings(config) else conversation_formats
    problems = 0
    for name, data in _data(config.data, spec):
        problems += len(reader.read(name, data, file_of)[1])
    return urls, problems


def _data(config: DataConfig, spec: str) -> Iterable[tuple[str, DataConfig]]:
    """Files to read, and the settings by which they are."""
    names = [spec] if spec else filter(None, (config.train, config.eval))
    for name in names:
        if spec or not is_packed(name, config):
            yield name, mixture_records.of_file(config, name)
    for source in config.mixture.values() if not spec else ():
        if not is_packed(source.train, config):
            yield source.train, mixture_records.of_source(config, source)
