"""A distributed job as its environment describes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Job:
    """Who we are, where rank 0 listens, and where the first rank of our node does.

    devices_by_node: a process holds one device, so these are the processes on each node.
    """

    rank: int
    world_size: int
    devices_by_node: tuple[int, ...]
    address: Address | None
    name: str
    """Equal on all ranks of a job and on no other job's."""
    relay: Address | None = None
    """Where the node's first rank relays for the others of the node; None where they reach rank 0 itself."""
    relayed: tuple[int, ...] = ()
    """On a node's first rank the ranks that it relays for."""


def job_from_environment(environ: Mapping[str, str]) -> Job:
    """Read what Paddle's launcher and `paddle.distributed.spawn` tell their workers.

    Every rank is given an endpoint of its own. The launcher uses another port for Paddle's store
    (PADDLE_MASTER), so that these are free; `spawn`, on one machine, puts the store on rank 0's, and then
    rank 1's is taken.
    """
    rank = int(environ.get("PADDLE_TRAINER_ID", "0"))
    endpoints = [
        item.strip() for item in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if item.strip()
    ]
    world_size = int(environ.get("PADDLE_TRAINERS_NUM", len(endpoints) or 1))
    by_node: dict[str, list[int]] = {}
    for number, endpoint in enumerate(endpoints):
        by_node.setdefault(endpoint.rpartition(":")[0], []).append(number)
    address: Address | None = None
    relay: Address | None = None
    relayed: tuple[int, ...] = ()
    if world_size > 1 and len(endpoints) >= 2:
        store_elsewhere = "PADDLE_MASTER" in environ or "MASTER_PORT" in environ
        address = _address(endpoints[0 if store_elsewhere else 1])
        node = next((ranks for ranks in by_node.values() if rank in ranks), [])
        if store_elsewhere and len(node) > 1 and 0 not in node:
            relay = _address(endpoints[node[0]])
            relayed = tuple(node[1:]) if rank == node[0] else ()
    name = hashlib.sha256(",".join(endpoints).encode()).hexdigest()[:16]
    devices = tuple(len(ranks) for ranks in by_node.values()) or (world_size,)
    return Job(rank, world_size, devices, address, name, relay, relayed)


def _address(endpoint: str) -> Address:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
