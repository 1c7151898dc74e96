"""The entry point ``jaxvlm <command>``: parses a command's flags, runs it, reports its errors."""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from absl import flags

from jaxvlm.cli.error_lines import REFUSED_BY_SYSTEM, in_words, of_settings
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
    *("federate", "launch", "sweep"),
)
_MODULES = {"eval": "evaluate"}  # a command whose module has another name than it


def module_of(name: str) -> str:
    """Return the name of a command's module."""
    return f"jaxvlm.cli.{_MODULES.get(name, name)}"


def _load(name: str) -> Any:
    """Import a command's module; ``--help`` does so without importing JAX."""
    return importlib.import_module(module_of(name))


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 on success, else as :func:`_exit_code` says."""
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
    if local_copies := sys.modules.get("jaxvlm.checkpoint.local_copies"):
        local_copies.remove_all()  # before an exit without exit handlers
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
        command.define(values, rest)  # for plan, this already reads the recipe
        if any(arg in ("--help", "-h", "-help") for arg in rest):
            print(_help(name, command, values, rest))
            return 0
        args = values(["jaxvlm", *rest])[1:]
        if "config" in values and values["config"].value is not None:
            _ = values["config"].value.items  # raises if the recipe failed to load
    except Exception as error:  # whatever a recipe or a setting's value can lead to
        return _fail(of_settings(error, name), 2)
    return _run(command, values, args)


def _run(command: Command, values: flags.FlagValues, args: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("jaxvlm").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_not_of_orbax)
    sys.unraisablehook = _print_unraisable
    try:
        _refuse_urls(command, values)
        result = command.run(values, args)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            _blame_peers(error)
            raise
        return _fail(in_words(error), code)
    if values.json and not _is_silent_process():
        print(json.dumps(_finite(result)), flush=True)
    return int(result.get("exit_code", 0))


def _refuse_urls(command: Command, values: flags.FlagValues) -> None:
    """Refuse object stores for a command's flags that name local files."""
    for name in getattr(command, "LOCAL", ()):
        if ":/" in (given := str(values[name].value or "")):
            from jaxvlm.checkpoint.run_record import local_folder

            local_folder(f"--{name}", given)


def _blame_peers(error: Exception) -> None:
    """End the process with one line if a peer's failure is why, even before the first step."""
    if "jax" in sys.modules:
        from jaxvlm.parallel.distributed.processes import end_if_a_peer_failed

        end_if_a_peer_failed(error)


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
    """The exit code for ``error``: 2 for bad input, 1 for a run that stopped, None for a bug.

    75 where the other processes can't be reached: one was lost before all had joined; and where an
    object store does not answer.
    """
    from jaxvlm.checkpoint.checkpointer import CheckpointError
    from jaxvlm.data.errors import DataError
    from jaxvlm.parallel.distributed.exit_status import LOST
    from jaxvlm.parallel.distributed.processes import JoinError
    from jaxvlm.stores.errors import StoreError
    from jaxvlm.train.loop import TrainingStopped

    if isinstance(error, StoreError) and error.passes:
        return LOST  # an object store that does not answer now
    expected = (ConfigError, DataError, CheckpointError, StoreError, FileNotFoundError)
    if isinstance(error, expected):
        return 2
    if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM:
        return 2
    if isinstance(error, JoinError):
        return LOST
    return 1 if isinstance(error, TrainingStopped) else None


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


if __name__ == "__main__":
    main()
