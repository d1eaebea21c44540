"""Rows that move between the ranks of a group, in blocks that a product can begin with before the others are there.

M rows, T ranks, R = ceil(M / T): block r is rows `r * R .. min(M, (r + 1) * R)`, and the last ones may be short or empty.

| what | each rank gives | each rank gets |
|---|---|---|
| `gather` | its block `[R, K]` | all blocks `[T * R, K]`, its own first, the others as they arrive |
| `scatter` | a part of every block, each when it is ready | the sum of all ranks' parts of its own block |

Two exchanges do the same. `Exchange` (base.py) calls the group's collectives: on CPUs, and where little is moved. `CopyExchange`
(copies.py) lets copy engines move the blocks between GPUs of one host while multiprocessors multiply.
"""

from __future__ import annotations

import logging
import socket

import torch

from ..comm import TPGroup
from .base import Exchange, Gather, Scatter
from .copies import CopyExchange

__all__ = ["CopyExchange", "Exchange", "Gather", "Scatter", "find_exchange", "make_exchange", "why_not_copy"]
log = logging.getLogger(__name__)


def find_exchange(group: TPGroup) -> Exchange:
    """The exchange of `group`, made at its first use, on every rank at the same time."""
    found = group.owned.get("exchange")
    if found is None:
        found = group.owned["exchange"] = make_exchange(group)
    return found


def make_exchange(group: TPGroup) -> Exchange:
    """One that copies where every rank can make one, else one that says why not; all ranks call it together.

    What fails though the GPUs reach each other is logged.
    """
    why_not, made = why_not_copy(group), None
    if not why_not:
        try:
            made, error = CopyExchange(group), ""
        except Exception as caught:  # no symmetric memory in this build or container, say: a rank's reason is that of all
            error = f"{type(caught).__name__}: {caught}"
        said = enumerate(group.gather_objects(error))
        why_not = next((f"TP rank {rank} could not prepare copies: {text}" for rank, text in said if text), "")
        if why_not:
            log.warning("rows move by collectives, in sequence with the products: %s", why_not)
    return Exchange(group, why_not) if why_not or made is None else made


def why_not_copy(group: TPGroup) -> str:
    """What keeps copy engines from moving rows between the ranks, empty if nothing does; asked of all ranks together."""
    if group.tp_size == 1 or group.group is None:
        return "there is one rank"
    if group.device.type != "cuda":
        return f"rows move by collectives on {group.device.type}"
    everyone = group.gather_objects((socket.gethostname(), group.device.index))
    hosts, indices = {host for host, _ in everyone}, [index for _, index in everyone]
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(set(indices)) < len(indices):
        return "several ranks share a GPU"
    own = group.device.index
    unreached = [i for i in indices if i != own and not torch.cuda.can_device_access_peer(own, i)]
    far = [(rank, missed) for rank, missed in enumerate(group.gather_objects(unreached)) if missed]
    return f"the GPU of TP rank {far[0][0]} does not reach the memory of GPU(s) {far[0][1]}" if far else ""
