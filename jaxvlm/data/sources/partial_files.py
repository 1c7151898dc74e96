"""Files and folders that are not whole yet, and what killed processes have left of them."""

from __future__ import annotations

import os
import pathlib
import re
import shutil


def is_alive(process: int) -> bool:
    """Whether a process of this host runs."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True


def remove_left_over(folder: pathlib.Path, prefix: str) -> None:
    """Remove folders named ``prefix`` and the number of a process that runs no more."""
    name = re.compile(re.escape(prefix) + r"(\d+)")
    for path in folder.iterdir():
        found = name.fullmatch(path.name)
        if found and not path.is_symlink() and not is_alive(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)
