"""Settings of extensions: a user's own losses, data formats, model families and cache policies.

An extension is a class, a function or a module, named by its setting ``target`` and imported here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any

from jaxvlm.config.convert import NO_OPTIONS, ConfigError, Options, checked_fields

_MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """Describes a class, function or module of the user's own (docs/extend.md)."""

    target: str = ""
    """Names the object as MODULE:NAME, or as path/to/FILE.py:NAME, whose path is made absolute; the
    default "" uses what is built in."""
    options: Mapping[str, Any] = NO_OPTIONS
    """Sets the fields of the frozen dataclass that ``target`` names; unknown fields and values of
    another type are refused."""

    def __post_init__(self) -> None:
        source, colon, name = self.target.partition(":")
        if source.endswith(".py"):
            source = str(pathlib.Path(source).expanduser().absolute())
        object.__setattr__(self, "target", f"{source}{colon}{name}")
        object.__setattr__(self, "options", Options(self.options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Extension):
    """Chooses the training loss: a built-in one by its name, or the user's own by its target."""

    name: str = "next_token"
    """Chooses a built-in loss, if ``target`` is empty: 'next_token' trains a language model, and
    the others train embeddings. Allowed values: 'next_token', 'info_nce', 'sigmoid', 'triplet',
    'cosine', 'cosent', 'margin_mse', 'distill'."""

    def recorded(self, trains_embeddings: bool) -> LossConfig:
        """These settings with what their class said when the run began, instead of the class.

        It is an attribute and no field, as it is no setting.
        """
        copy = dataclasses.replace(self)
        object.__setattr__(copy, "trains_embeddings", trains_embeddings)
        return copy


def is_set(extension: Extension, path: str) -> bool:
    """Whether the group of settings ``path`` names an extension.

    Raises:
        ConfigError: it has options, which nothing reads without a target.
    """
    if extension.options and not extension.target:
        name, value = next(iter(extension.options.items()))
        raise ConfigError(f"{path}.options.{name}={value!r} is not read without {path}.target")
    return bool(extension.target)


def resolve(extension: Extension, path: str, allow_module: bool = False) -> Any:
    """The class, function or module that ``target`` names; it is imported where it was not yet.

    Args:
        extension: ``target`` is ``MODULE:NAME``, ``path/to/FILE.py:NAME``, or a module or file
            alone.
        path: what error messages call the group of settings, for instance ``config.loss``.
        allow_module: whether a module or file alone will do.

    Raises:
        ConfigError: there is no such file, module or name, or importing it fails.
    """
    what = f"{path}.target={extension.target!r}"
    source, _, name = extension.target.partition(":")
    found: Any = _load_file(source, what) if source.endswith(".py") else _load_module(source, what)
    for part in filter(None, name.split(".")):
        if not hasattr(found, part):
            public = [x for x in vars(found) if not x.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1, cutoff=0.5)
            raise ConfigError(
                f"{what}: {source} has no {part!r}; "
                + (f"did you mean {near[0]!r}?" if near else "give MODULE:NAME or FILE.py:NAME")
            )
        found = getattr(found, part)
    if isinstance(found, types.ModuleType) and not allow_module:
        kind = "file" if source.endswith(".py") and not name else "module"
        own = [key for key, x in vars(found).items() if _is_written_in(x, found.__name__)]
        raise ConfigError(
            f"{what} names a {kind}, not a class or function; add :NAME"
            + (f" ({', '.join(own)})" if own else "")
        )
    return found


def _is_written_in(value: Any, module: str) -> bool:
    """Whether it is a public class or function of a module's own."""
    named = isinstance(value, type | types.FunctionType) and not value.__name__.startswith("_")
    return named and value.__module__ == module


def make(
    extension: Extension, path: str, given: Mapping[str, Any] = {}, allow_module: bool = False
) -> Any:
    """The object that ``target`` names: an instance of a class, or a function or module itself.

    A class with options is a frozen dataclass, and ``options`` are its fields.

    Args:
        extension: target and options.
        path: what error messages call the group of settings.
        given: fields that other settings of the run have a value for, by name; options can't set
            them.
        allow_module: see :func:`resolve`.

    Raises:
        ConfigError: see :func:`resolve`; an option that the class has no field for, or of a wrong
            type, or one that is missing.
    """
    found = resolve(extension, path, allow_module)
    what = f"{path}.target={extension.target!r}"
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return _instance(found, extension.options, f"{path}.options", what, given)
    if extension.options or given:
        name = next(iter({**extension.options, **given}))
        raise ConfigError(
            f"{path}.options.{name}: {what} has no fields; make it a class with "
            "@dataclasses.dataclass(frozen=True)"
        )
    return found() if isinstance(found, type) else found


def _instance(
    kind: Any, options: Mapping[str, Any], path: str, what: str, given: Mapping[str, Any]
) -> Any:
    if not kind.__dataclass_params__.frozen:
        raise ConfigError(f"{what} must be a frozen dataclass: @dataclasses.dataclass(frozen=True)")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in given:
        if name not in fields:
            raise ConfigError(f"{what} reads {name!r}, but has no field of that name to take it")
        if name in options:
            raise ConfigError(f"{path}.{name} can't be set: {what} reads the run's {name}")
    try:
        values = {**checked_fields(options, kind, path), **given}
        for name, field in fields.items():
            if name not in values and field.default is field.default_factory is _MISSING:
                raise ConfigError(f"{path}.{name} is not set; {what} needs it")
        return kind(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError, NameError) as error:  # of its __post_init__ or annotations
        raise ConfigError(f"{what}: {path}={dict(options)}: {error}") from error


def _load_module(name: str, what: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{what}: importing it failed {failure(error, name)}") from error
        raise ConfigError(
            f"{what}: no module {error.name!r}; install it or set PYTHONPATH, or give a file: "
            "path/to/FILE.py:NAME"
        ) from None
    except Exception as error:  # whatever a user's module may raise
        raise ConfigError(f"{what}: importing it failed {failure(error, name)}") from error


def _load_file(name: str, what: str) -> types.ModuleType:
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigError(
            f"{what}: no such file; give FILE.py:NAME or MODULE:NAME (a trained run's path is in "
            "its config.json)"
        )
    try:
        return _execute(str(path), path.stat().st_mtime_ns)
    except Exception as error:  # whatever a user's file may raise
        raise ConfigError(f"{what}: importing it failed {failure(error, name)}") from error


@functools.lru_cache(maxsize=64)
def _execute(path: str, changed: int) -> types.ModuleType:
    """The file as a module; again where it has ``changed`` since it was imported."""
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    name = f"jaxvlm_extension_{digest}_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and type hints look for its names
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def failure(error: Exception, source: str = "") -> str:
    """What went wrong in a user's code, and at which of its lines.

    Args:
        error: what was raised.
        source: the user's file or module; "": the line is that which raised.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    stem = f"{source.removesuffix('.py').replace('.', '/')}.py"
    own = [frame for frame in frames if frame[0].endswith(stem)] if source else []
    file, line = (own or frames)[-1]
    first = (str(error).strip().splitlines() or [""])[0]  # JAX's go on for a paragraph
    return f"at {os.path.basename(file)}:{line}: {type(error).__name__}: {first}"
