"""A site's process without a model: ``flower_site.py NAME SOCKET FILE ROUNDS SECONDS MEGABYTES``.

What it keeps for the time after a kill is in FILE. The federation has ROUNDS, each of which takes
SECONDS, and MEGABYTES of parameters more than ``fake_sites.FIRST``.
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from federate import fake_sites, flower_recipe
from federate.fake_sites import FakeSite

from jaxvlm.checkpoint import run_record
from jaxvlm.config import from_config_dict
from jaxvlm.federate import messages
from jaxvlm.federate.mailbox import SiteSocket


def main(name: str, socket: str, kept: str, rounds: str, seconds: str, megabytes: str) -> None:
    path = pathlib.Path(kept)
    config = flower_recipe.get_config()
    config.federate.rounds = int(rounds)
    fake_sites.CONFIG[0] = from_config_dict(config)
    if float(megabytes):
        size = int(float(megabytes) * 2**20 / 4)
        fake_sites.FIRST["decoder/w"] = np.linspace(-1, 1, size, dtype=np.float32)
    with SiteSocket(pathlib.Path(socket)) as mailbox:
        site = FakeSite(name, mailbox.call)
        if path.exists():
            found = messages.unpack(path.read_bytes())
            site.disk = (found.head["version"], found.arrays, found.head["number"], None)
        is_over = False
        while not is_over:
            is_over = site.turn()
            if site.disk is not None:
                version, params, number, _ = site.disk
                head = {"version": version, "number": number}
                run_record.write_whole(path, messages.pack("kept", head, params))
            time.sleep(float(seconds))


main(*sys.argv[1:])
