"""What it costs a federation that each site's visual-token cache knows its version.

    PYTHONPATH=. python benchmarks/federation_coherence.py

One site trains the recipe's model with a trained, cached vision encoder (in process, without a
transport). ``share``: seconds of digests, of comparing them and of raising the cache's version,
over the site's seconds between the first exchange and the last; target: at most 1 %. ``bytes``:
of the digests and lags in the messages of a round; target: at most 1 KiB a site and round.
Writes results/federation_coherence_cpu.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.common import environment, write
from configs.federated import get_config
from jaxvlm.config import CacheConfig
from jaxvlm.federate import messages
from jaxvlm.federate.client import Client
from jaxvlm.federate.service import Service
from jaxvlm.sites import callback as site_callback
from jaxvlm.sites.site import make_site
from jaxvlm.trainer.training import Training

ROUNDS, STEPS = 6, 20


class Stopwatch:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        return timed


def protocol_bytes(data: bytes) -> int:
    """Bytes of a message that are there for the cache alone."""
    head = messages.unpack(data).head
    of_cache = {name: head[name] for name in ("digests", "token_lag") if name in head}
    return len(json.dumps(of_cache)) - 2 if of_cache else 0


def main() -> None:
    config = get_config()
    config = dataclasses.replace(
        config,
        federate=dataclasses.replace(config.federate, sites=1, rounds=ROUNDS),
        outer=dataclasses.replace(config.outer, steps=STEPS),
        steps=ROUNDS * STEPS,
        eval_records=0,
        data=dataclasses.replace(config.data, eval="", flip=False, max_shift=0),
        cache=CacheConfig(policy="lazy", max_staleness=60, encode_batch=8),
    )
    watch, exchanges, sizes = Stopwatch(), [], []
    exchange = site_callback.FederationCallback.exchange
    # Digests of what is sent anyway guard the update too; all of them are counted.
    counted = (
        (site_callback, "group_digests"),
        (site_callback.FederationCallback, "_token_updates"),
        (messages, "group_digests"),
        (Training, "older"),
    )

    def noted(self: Any, step: int, state: Any) -> Any:
        result = exchange(self, step, state)
        if self.exchanges(step):
            exchanges.append((time.perf_counter(), watch.seconds))
        return result

    with contextlib.ExitStack() as stack:
        for module, name in counted:
            around = watch.around(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, around))
        stack.enter_context(mock.patch.object(site_callback.FederationCallback, "exchange", noted))
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = Service(config, folder / "coordinator")

        def call(data: bytes) -> bytes:
            answer = service.handle(data)
            if messages.unpack(data).kind != "join":
                sizes.append(protocol_bytes(data) + protocol_bytes(answer))
            return answer

        make_site(config, folder / "site", Client("site", call)).fit()
    assert service.state is not None
    params = service.state.params
    (begin, before), (end, after) = exchanges[0], exchanges[-1]
    result = {
        "share": (after - before) / (end - begin),
        "seconds_a_round": (after - before) / (ROUNDS - 1),
        "site_seconds_a_round": (end - begin) / (ROUNDS - 1),
        "bytes_a_site_and_round": sum(sizes) / ROUNDS,
        "parameters": sum(x.size for x in params.values()),
        "environment": environment(),
    }
    print({k: v for k, v in result.items() if k != "environment"})
    write("federation_coherence_cpu.json", result)


if __name__ == "__main__":
    main()
