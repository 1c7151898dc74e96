"""What of a run's record is another one here and now: settings, versions, code, and files."""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxvlm.checkpoint.run_record import (
    CONFIG,
    FLAGS,
    OF_DEVICES,
    SOURCES,
    code_of,
    has_checkpoint,
    numeric_settings,
    read_config,
    url_of,
    versions,
)
from jaxvlm.config import Config, ConfigError, changes, json_text

_log = logging.getLogger(__name__)


def read_config_to_use(workdir: str | pathlib.Path) -> Config:
    """Reads the settings of the run in ``workdir``, for use in any folder.

    A file of ``data.train``, ``data.eval`` or ``data.image_root`` that is not where its relative
    path leads from the current folder is taken from the folder in which the run was started.

    Raises:
        ConfigError: as for :func:`read_config`.
    """
    config = read_config(workdir)
    document = json_text.read(pathlib.Path(workdir) / CONFIG)
    for line in _in_two_folders(document, config):
        _log.warning("%s", line)
    changed: dict[str, Any] = {}
    sources: dict[str, Any] = dict(config.data.mixture)
    for name, path, there in _relative(document, config):
        if _is_found(path):
            continue
        if _is_found(there):
            *group, field = name.split(".")
            if group:
                source = sources[group[-1]]
                sources[group[-1]] = dataclasses.replace(source, **{field: str(there)})
            else:
                changed[name] = str(there)
        elif path.suffix and not config.data.format.target:  # a file, not a name as easy-vqa:test
            _log.warning(
                "config.data.%s=%s is neither in this folder nor in %s, where the run was started",
                name,
                path,
                document["folder"],
            )
    changed["mixture"] = sources
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changed))


def _relative(
    document: dict[str, Any], config: Config
) -> Iterator[tuple[str, pathlib.Path, pathlib.Path]]:
    """Setting, relative path, and where it led when the run was started, if not from this folder.

    Args:
        document: the run's ``config.json``.
        config: settings whose paths are asked for.
    """
    start, names = document.get("folder"), ("train", "eval", "image_root", "fetched")
    given_names = {name: getattr(config.data, name) for name in names}
    for source, settings in config.data.mixture.items():
        given_names[f"mixture.{source}.train"] = settings.train
        given_names[f"mixture.{source}.image_root"] = settings.image_root
    for name, given in given_names.items():
        path = pathlib.Path(given).expanduser()
        if "://" in given:
            continue
        if isinstance(start, str) and start != os.getcwd() and given and not path.is_absolute():
            yield name, path, pathlib.Path(start) / path


def _in_two_folders(document: dict[str, Any], config: Config) -> Iterator[str]:
    """Lines about names that lead to one file here and to another where the run was started."""
    for name, path, there in _relative(document, config):
        if path.exists() and there.exists() and not path.samefile(there):
            yield f"config.data.{name}={path} is read in this folder; {there} is another one"


def _is_found(path: pathlib.Path) -> bool:
    return bool(glob.glob(glob.escape(str(path)))) or bool(glob.glob(str(path)))


def changed_settings(workdir: pathlib.Path, config: Config) -> list[str]:
    """Lists settings, versions and code that differ from the last start's of a run.

    Raises:
        ConfigError: a setting of JAX or of a library that changes results is another one; flags and
            variables that go with a kind of device are only listed.
    """
    try:
        old = read_config(workdir)
    except ConfigError as error:  # the file is about to be rewritten
        return [str(error)]
    document = json_text.read(workdir / CONFIG)
    lines = list(_in_two_folders(document, config))
    for line in changes(old, config):
        is_source = line.split(":")[0].endswith(SOURCES) and has_checkpoint(workdir)
        note = "; it is not read: the run goes on from its own checkpoint" * is_source
        lines.append(f"changed since this run began: {line}{note}")
    for what, key, current in (
        ("version", "versions", versions()),
        ("code", "code", code_of(config)),
    ):
        lines += [
            f"{what} of {name} since the last start: {was} -> {current.get(name)}; bits may differ"
            for name, was in sorted(_object(document, key).items())
            if was != current.get(name)
        ]
    before = _object(document, "numeric_settings")
    now = numeric_settings()
    for name in sorted(before.keys() | now.keys()):
        if (was := before.get(name, "")) != (value := now.get(name, "")):
            line = f"{name} was {was or 'not set'} when this run began, and is {value or 'not set'}"
            if name not in (*FLAGS, *OF_DEVICES):
                where = url_of(workdir) or workdir
                raise ConfigError(f"{where}: {line}; it changes results, so set it as it was")
            lines.append(line)
    return lines


def _object(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of a ``config.json``; {} where an older jaxvlm wrote none, or it is damaged."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}
