"""The few places where JAX offers no public name, all in one file.

``jax.distributed`` keeps its key-value store to itself; Orbax reaches for it in the same way. A
scan's equation says how its inputs are divided in a form of each version's own.
Checked with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed


def scan_inputs(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carries a scan's equation takes, from its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carries))


def coordinator_host() -> str:
    """The host part of the coordinator's address, brackets of IPv6 dropped."""
    address = distributed.global_state.coordinator_address or ""
    return address.rsplit(":", 1)[0].strip("[]")


def put(key: str, value: str) -> None:
    """Stores a value where every process can read it."""
    _client().key_value_set(key, value)


def get(key: str, timeout_s: float) -> str:
    """The value, waiting until some process has put it.

    Raises:
        RuntimeError: nobody did within ``timeout_s`` seconds.
    """
    return _client().blocking_key_value_get(key, int(timeout_s * 1000))


def _client():
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client
