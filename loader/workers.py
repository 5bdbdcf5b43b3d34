"""Who reads: which data-parallel rank this process is, and which DataLoader worker of it.

Nothing here talks to another process; ``torch.distributed`` is only asked what it knows already.
"""

from __future__ import annotations

import multiprocessing
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cachefs.config import rank_environment
from cachefs.errors import ConfigError

_TEAMS = 0xFFFFFF


@dataclass(frozen=True)
class Place:
    """One data-parallel rank of ``world``."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(f"rank {self.rank} of world size {self.world} cannot be")


@dataclass(frozen=True)
class Worker:
    """One of ``count`` processes that read for one rank: worker w takes batches w, w + count, ... of a pass.

    ``team``: a number of 24 bits, not 0, that the workers of one iteration of a DataLoader have in common.
    """

    index: int
    count: int
    team: int = 1

    def in_iteration(self, number: int) -> Worker:
        """This worker in that iteration, of the many that one which persists takes part in."""
        return replace(self, team=(self.team + number * self.count) % _TEAMS + 1)


ALONE = Worker(0, 1)


def find_place(
    rank: int | None, world_size: int | None, mesh: Any = None, environ: Mapping[str, str] | None = None
) -> Place:
    """The rank from the arguments or the mesh, else from ``torch.distributed``, else ``RANK`` and ``WORLD_SIZE``.

    Raises ``ConfigError`` for half an answer or one that cannot be.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together: give both or neither")
    if mesh is not None:
        if rank is not None:
            raise ConfigError("give either mesh or rank and world_size")
        return _from_mesh(mesh)
    if rank is not None and world_size is not None:
        return Place(rank, world_size)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size())
    values = rank_environment(environ)
    if values is None:
        return Place(0, 1)
    try:
        return Place(*map(int, values))
    except ValueError as e:
        raise ConfigError(f"RANK={values[0]!r} WORLD_SIZE={values[1]!r} cannot be used: {e}") from e


def _from_mesh(mesh: Any) -> Place:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1:
        if "dp" not in names:
            raise ConfigError(
                f"a mesh with dimensions {names} does not say which of them splits the data",
                hint='pass its data-parallel part, for example mesh["dp"]',
            )
        mesh = mesh["dp"]
    return Place(int(mesh.get_local_rank()), int(mesh.size()))


def parent_of_worker() -> int | None:
    """The process that made this DataLoader worker; ``None`` in a process that is none."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and find_worker() is not None else None


def find_worker() -> Worker | None:
    """This DataLoader worker, or ``None`` in a process that is none."""
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module is not None else None
    if info is None:
        return None
    common = info.seed - info.id  # what DataLoader draws once for all workers of an iterator
    return Worker(info.id, info.num_workers, zlib.crc32(f"{common} {info.num_workers}".encode()) % _TEAMS + 1)
