"""Uses of JAX's private API, all in one file.

``jax.distributed`` has no public access to its key-value store; Orbax uses it in the same way. How
a scan's equation divides its inputs differs between versions. Checked with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed


def scan_inputs(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and carries of a scan's equation, from its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carries))


def coordinator_host() -> str:
    """Return the host part of the coordinator's address, without the brackets of IPv6."""
    address = distributed.global_state.coordinator_address or ""
    return address.rsplit(":", 1)[0].strip("[]")


def put(key: str, value: str) -> None:
    """Store a value in the key-value store that every process can read."""
    _client().key_value_set(key, value)


def get(key: str, timeout_s: float) -> str:
    """Return a value of the key-value store; blocks until some process has put it.

    Raises:
        RuntimeError: no process put it within ``timeout_s`` seconds.
    """
    return _client().blocking_key_value_get(key, int(timeout_s * 1000))


def _client():
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client
