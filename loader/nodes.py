"""How many nodes a job has, which of them reads which lanes, and which run of a batch each rank takes. Pure.

Nodes are named; the names are stable over restarts, rank numbers need not be. A *table* is one node name per lane. It
is kept in the loader's state, so that a restart finds its lanes, hence its cached shards, where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from cachefs.errors import ConfigError

from .permute import Int64s


def launched_nodes(launcher: Mapping[str, str], world: int) -> int:
    """On how many nodes a launcher started the ``world`` ranks, in equal groups that follow one another; 1 if unsure.

    ``launcher`` is what it tells all ranks alike (``cachefs.config.launcher_environment``). The number of nodes shapes
    the order, by the default number of lanes, and who reads what; so it is never taken from what one node knows of
    itself. torchrun's ``LOCAL_WORLD_SIZE`` and Slurm's ``SLURM_TASKS_PER_NODE`` of a node may differ between nodes, and
    a rank cannot tell; how many groups of ranks there are (``GROUP_WORLD_SIZE``) torchrun's rendezvous has decided for
    all. Where the ranks cannot be divided by that, and where these are not all of the launcher's ranks, every rank
    finds so by the same numbers and takes one node.
    """
    if launcher.get("WORLD_SIZE") == str(world) and "GROUP_WORLD_SIZE" in launcher:
        nodes = launcher["GROUP_WORLD_SIZE"]
    elif launcher.get("SLURM_STEP_NUM_TASKS") == str(world) and _in_blocks(launcher.get("SLURM_DISTRIBUTION", "")):
        nodes = launcher.get("SLURM_STEP_NUM_NODES", "")
    else:
        return 1
    count = int(nodes) if nodes.isascii() and nodes.isdecimal() else 1
    return count if count and world % count == 0 else 1


def _in_blocks(distribution: str) -> bool:
    """Whether Slurm numbers the tasks node after node: what it does unless told otherwise."""
    return distribution.partition(":")[0] in ("", "block", "*")


def grouped(world: int, names: Sequence[str]) -> tuple[str, ...]:
    """The node of each of ``world`` ranks, in equal groups that follow one another: as many as there are names."""
    return tuple(names[rank * len(names) // world] for rank in range(world))


def unnamed(nodes: int) -> tuple[str, ...]:
    """Names for nodes whose own nobody knows."""
    return tuple(f"node-{number}" for number in range(nodes))


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """The same names, with a number behind each that came before: two groups of ranks on one machine are two nodes."""
    met: Counter[str] = Counter()
    out = []
    for name in names:
        met[name] += 1
        out.append(name if met[name] == 1 else f"{name}#{met[name]}")
    return tuple(out) if len(set(out)) == len(out) else unnamed(len(out))


def ranks_of_nodes(node_of_rank: Sequence[str]) -> dict[str, int]:
    """How many ranks each node has, in the order in which the ranks first name them."""
    return dict(Counter(node_of_rank))


def runs_of_ranks(node_of_rank: Sequence[str]) -> Int64s:
    """The run of a batch that each rank takes: ranks sorted by node (in order of first mention), then by rank.

    With the ranks of a node numbered one after another it is the rank itself.
    """
    place = {name: i for i, name in enumerate(ranks_of_nodes(node_of_rank))}
    order = np.argsort(np.array([place[name] for name in node_of_rank], dtype=np.int64), kind="stable")
    runs = np.empty(len(order), dtype=np.int64)
    runs[order] = np.arange(len(order), dtype=np.int64)
    return runs


def assign_lanes(lanes: int, nodes: Mapping[str, int], previous: Sequence[str] | None = None) -> tuple[str, ...]:
    """The node of each lane: in proportion to the nodes' ranks, with the fewest lanes moved from ``previous``.

    ``nodes`` maps names to numbers of ranks. A node with r of R ranks gets lanes * r / R lanes; where that is no whole
    number, the next one below or above. Which nodes get one more is chosen so that fewest lanes move (then by the
    larger remainder, then by the mapping's order), so no table that keeps the proportion is reached by fewer moves.
    Without ``previous`` nodes get neighbouring lanes, in the mapping's order.

    Raises ConfigError if there is no rank, or ``previous`` is for another number of lanes.
    """
    world = sum(nodes.values())
    if lanes < 1 or world < 1 or min(nodes.values()) < 0:
        raise ConfigError(f"{lanes} lanes cannot be assigned to {world} ranks on {len(nodes)} nodes")
    if previous is not None and len(previous) != lanes:
        raise ConfigError(f"the table to repair is for {len(previous)} lanes, not for {lanes}")
    held = Counter(previous or ())
    share = {name: lanes * ranks // world for name, ranks in nodes.items()}
    rest = {name: lanes * ranks % world for name, ranks in nodes.items()}
    spare = lanes - sum(share.values())
    # sorted() is stable: what is equal stays in the mapping's order
    takers = sorted((n for n in nodes if rest[n]), key=lambda n: (held[n] <= share[n], -rest[n]))
    for name in takers[:spare]:
        share[name] += 1
    table: list[str | None] = [None] * lanes
    for lane, name in enumerate(previous or ()):
        if share.get(name, 0) > 0:
            share[name] -= 1
            table[lane] = name
    free = (name for name, count in share.items() for _ in range(count))
    return tuple(next(free) if name is None else name for name in table)


def nodes_of_lanes(table: Sequence[str], nodes: Mapping[str, int]) -> Int64s:
    """The table as numbers for ``rank_positions``, int64 ``(lanes,)``: the place of each lane's node in ``nodes``."""
    place = {name: i for i, name in enumerate(nodes)}
    return np.array([place[name] for name in table], dtype=np.int64)
