"""The entry point ``jaxvlm <command>``: parses a command's flags, runs it, reports its errors."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from absl import flags

from jaxvlm.cli.common import RecipeError
from jaxvlm.config import ConfigError


@runtime_checkable
class Command(Protocol):
    """The interface of a command: each is a module of ``jaxvlm.cli``."""

    SUMMARY: str
    USAGE: str

    def define(self, values: flags.FlagValues, argv: list[str]) -> None:
        """Declare the command's flags on ``values``; ``argv`` are its arguments."""
        ...

    def run(self, values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
        """Run the command and return the result that ``--json`` prints."""
        ...


COMMANDS = (
    *("train", "eval", "generate", "embed", "mine", "export", "plan", "data", "cache"),
    *("federate", "launch"),
)
_MODULES = {"eval": "evaluate"}  # a command whose module has another name than it


def _load(name: str) -> Any:
    """Import a command's module; ``--help`` does so without importing JAX."""
    return importlib.import_module(f"jaxvlm.cli.{_MODULES.get(name, name)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 on success, 1 if a run had to stop, 2 on bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # an id may have characters that it can't write
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        # Whoever read the output has gone, as in `jaxvlm ... | head`: that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    if "jax" in sys.modules:  # a failed process must not wait for its peers
        from jaxvlm.parallel.distributed.processes import exit_now

        try:
            exit_now(code)
        except SystemExit:
            if code:  # nor for library threads that wait for the failed one
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    sys.exit(code)


def _is_closed(stream: Any) -> bool:
    """Whether no one reads a pipe that still has to be written to."""
    try:
        stream.write("\n")
        stream.flush()
    except BrokenPipeError:
        return True
    return False


def run(argv: list[str]) -> int:
    """Run ``argv``, which does not include the program's name, and return the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        from jaxvlm import __version__

        print(f"jaxvlm {__version__}")
        return 0
    if name not in COMMANDS:
        return _fail(f"unknown command {name!r}; commands: {', '.join(COMMANDS)}", 2)
    command = _load(name)
    values = flags.FlagValues()
    flags.DEFINE_bool(
        "json", False, "Print the result as one JSON object on the last line.", flag_values=values
    )
    flags.DEFINE_bool("help", False, "Print this help text.", short_name="h", flag_values=values)
    try:
        with _said_for_people(name):
            command.define(values, rest)  # for plan, this already reads the recipe
            if any(arg in ("--help", "-h", "-help") for arg in rest):
                print(_help(name, command, values, rest))
                return 0
            args = _parsed(values, rest)
    except _BadInputError as error:
        return _fail(str(error), 2)
    return _run(command, values, args)


class _BadInputError(ValueError):
    """A command line that can't be used; the message is for people."""


def parse(name: str, argv: list[str]) -> flags.FlagValues:
    """Parse another command's arguments, as it would.

    Raises:
        ValueError: they can't be used.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "", flag_values=values)
    with _said_for_people(name):
        _load(name).define(values, argv)
        _parsed(values, argv)
    return values


def _parsed(values: flags.FlagValues, argv: list[str]) -> list[str]:
    args: list[str] = values(["jaxvlm", *argv])[1:]
    if "config" in values and values["config"].value is not None:
        _ = values["config"].value.items  # raises if the recipe failed to load
    return args


@contextlib.contextmanager
def _said_for_people(name: str) -> Iterator[None]:
    """Raise what a command line or its recipe leads to as one line."""
    try:
        yield
    except flags.Error as error:
        text = str(error)
        if group := re.search(r"--([\w.]+)=(\S+): Failed to parse .* as a ConfigDict", text):
            raise _BadInputError(
                f"--{group[1]}={group[2]}: it is a group of settings; set its fields, such as "
                f"--{group[1]}.name=value"
            ) from error
        raise _BadInputError(f"{text} (see `jaxvlm {name} --help`)") from error
    except RecipeError as error:
        raise _BadInputError(_unknown_setting(error.__cause__) or str(error)) from error
    except OSError as error:
        if error.errno is not None:  # the recipe's own: ml_collections' error has no number
            raise _BadInputError(f"the recipe: {_words(error)}") from error
        last = str(error).splitlines()[-1]
        raise _BadInputError(f"--config: no such recipe: {last}") from error
    except Exception as error:  # whatever a setting's value can lead to
        advice = f"an override of the recipe: {type(error).__name__}: {error}"
        raise _BadInputError(_unknown_setting(error) or advice) from error


def _run(command: Command, values: flags.FlagValues, args: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("jaxvlm").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_not_of_orbax)
    sys.unraisablehook = _print_unraisable
    try:
        result = command.run(values, args)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            _blame_peers(error)
            raise
        return _fail(_words(error), code)
    if values.json and not _is_silent_process():
        print(json.dumps(_finite(result)), flush=True)
    return int(result.get("exit_code", 0))


def _blame_peers(error: Exception) -> None:
    """End the process with one line if a peer's failure is why, even before the first step."""
    if "jax" in sys.modules:
        from jaxvlm.parallel.distributed.processes import end_if_a_peer_failed

        end_if_a_peer_failed(error)


def _unknown_setting(error: BaseException | None) -> str:
    """What ml_collections says of a key that a ConfigDict does not have; "" of other errors."""
    cause: Any = error
    if isinstance(error, AttributeError) and error.args:
        cause = error.args[0]
    text = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else ""
    near = re.search(r'Did you mean "(.+)" instead of "(.+)"', text)
    unknown = near[2] if near else "".join(re.findall(r'^Key "(.+?)" does not exist', text))
    advice = f"; did you mean {near[1]!r}?" if near else ""
    return f"--config: no such setting: {unknown!r}{advice}" if unknown else ""


def _is_silent_process() -> bool:
    """Whether another process reports for this one."""
    if "jax" not in sys.modules:
        return False
    from jaxvlm.parallel.distributed.processes import is_silent

    return is_silent()


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None, since JSON can't represent them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _exit_code(error: Exception) -> int | None:
    """The exit code for ``error``: 2 for bad input, 1 for a run that stopped, None for a bug."""
    from jaxvlm.checkpoint.checkpointer import CheckpointError
    from jaxvlm.data.errors import DataError
    from jaxvlm.parallel.distributed.processes import JoinError
    from jaxvlm.train.loop import TrainingStopped

    if isinstance(error, (ConfigError, DataError, CheckpointError, FileNotFoundError)):
        return 2
    if isinstance(error, OSError) and error.errno in _REFUSED_BY_SYSTEM:
        return 2
    return 1 if isinstance(error, (TrainingStopped, JoinError)) else None


# What a full, a read-only or somebody else's disk answers, and a name that is no file or folder.
_REFUSED_BY_SYSTEM = {
    errno.ENOSPC: "free some space, or name a folder on another disk",
    errno.EDQUOT: "free some of your quota, or name a folder on another disk",
    errno.EFBIG: "the limit of a file's size (ulimit -f) is too low",
    errno.EROFS: "name a folder that can be written to",
    errno.EACCES: "change its permissions, or name another one",
    errno.EPERM: "change its permissions, or name another one",
    errno.ENOTDIR: "a part of it is a file, not a folder; name another one",
    errno.EISDIR: "name a file, not a folder",
    errno.EEXIST: "it is in the way; move it, or name another one",
    errno.ENAMETOOLONG: "use a shorter name",
}


def _words(error: Exception) -> str:
    """What is said of ``error``: of the system's, the file, why it failed and what to do."""
    advice = _REFUSED_BY_SYSTEM.get(error.errno or 0) if isinstance(error, OSError) else None
    if not isinstance(error, OSError) or advice is None:
        return str(error)
    where = error.filename2 or error.filename or "a file that is being written"
    return f"{where}: {(error.strerror or str(error)).lower()}; {advice}"


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a log record is none of Orbax's tracebacks: what it logs so, it also raises to us."""
    return record.name != "absl" or not record.exc_info


def _print_unraisable(unraisable: Any) -> None:
    """Print an error that can't be raised; not those of writes that end after a failed checkpoint.

    TensorStore's threads report to an event loop that Orbax closed at the first failed write, and
    print what that raises, once for each array.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _fail(text: str, code: int) -> int:
    """Print one line on stderr, without colours so that it is readable in any log."""
    print(f"jaxvlm: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _overview() -> str:
    lines = ["usage: jaxvlm <command> [flags]", "", "commands:"]
    lines += [f"  {name:<10}{_load(name).SUMMARY}" for name in COMMANDS]
    return "\n".join([*lines, "", "`jaxvlm <command> --help` explains a command's flags."])


def _help(name: str, command: Command, values: flags.FlagValues, argv: list[str]) -> str:
    shown_flags = {f.name for f in values._flags().values()} - {"help"}
    usage = command.USAGE
    verbs: dict[str, Sequence[str]] = getattr(command, "VERBS", {})
    if argv[0] in verbs:  # of this one alone
        shown_flags &= {"json", *verbs[argv[0]]}
        usage = next(x for x in usage.split(" | ") if x.startswith(argv[0]))
    lines = [f"usage: jaxvlm {name} {usage}", "", command.SUMMARY, "", "flags:"]
    for flag in sorted(shown_flags):
        default = values[flag].default
        shown = f" (default: {default})" if default not in (None, "", False, []) else ""
        text = " ".join(str(values[flag].help).split())  # absl adds lines to some helps,
        text = text.removesuffix("; repeat this option to specify a list of values")  # and this
        lines.append(f"  --{flag}\n      {text}{shown}")
    return "\n".join(lines)
