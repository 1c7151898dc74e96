"""What is said of an error in one line: of settings on the command line, and of the system's."""

from __future__ import annotations

import errno
import re
from typing import Any

from absl import flags

from jaxvlm.cli.common import RecipeError

# What a full, a read-only or somebody else's disk answers, and a name that is no file or folder.
REFUSED_BY_SYSTEM = {
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


def in_words(error: Exception) -> str:
    """What is said of ``error``: of the system's, the file, why it failed and what to do."""
    advice = REFUSED_BY_SYSTEM.get(error.errno or 0) if isinstance(error, OSError) else None
    if not isinstance(error, OSError) or advice is None:
        return str(error)
    where = error.filename2 or error.filename or "a file that is being written"
    return f"{where}: {(error.strerror or str(error)).lower()}; {advice}"


def of_settings(error: Exception, command: str) -> str:
    """What is said of an error that flags, a recipe or its overrides lead to.

    Args:
        error: raised where a command's flags are declared, parsed or read.
        command: whose help explains the flags.
    """
    if isinstance(error, flags.Error):
        text = str(error)
        if group := re.search(r"--([\w.]+)=(\S+): Failed to parse .* as a ConfigDict", text):
            return (
                f"--{group[1]}={group[2]}: it is a group of settings; set its fields, such as "
                f"--{group[1]}.name=value"
            )
        return f"{text} (see `jaxvlm {command} --help`)"
    if isinstance(error, RecipeError):
        return _unknown_setting(error.__cause__) or str(error)
    if isinstance(error, OSError):
        if error.errno is not None:  # the recipe's own: ml_collections' error has no number
            return f"the recipe: {in_words(error)}"
        return f"--config: no such recipe: {str(error).splitlines()[-1]}"
    advice = f"an override of the recipe: {type(error).__name__}: {error}"
    return _unknown_setting(error) or advice


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
