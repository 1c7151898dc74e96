"""A site's process without a model: ``flower_site.py NAME SOCKET FILE SECONDS``.

What it keeps for the time after a kill is in FILE; each round takes SECONDS.
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from federate.fake_sites import FakeSite

from jaxvlm.checkpoint import run_record
from jaxvlm.federate import messages
from jaxvlm.federate.mailbox import SiteSocket


def main(name: str, socket: str, kept: str, seconds: str) -> None:
    path = pathlib.Path(kept)
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
