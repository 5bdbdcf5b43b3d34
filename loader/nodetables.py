"""The nodes of a run, and which lanes each of them reads: what the ranks of a data set must see alike.

The number of nodes is known without asking anybody (:func:`loader.nodes.launched_nodes`), and so is the table of lanes
of a run that begins: it does not depend on the nodes' names. These are needed to repair the table of an earlier run and
to write one into a state; only then they are agreed (:mod:`loader.nodenames`), by the process of a rank itself. Its
DataLoader workers get what it agreed on when it started them, and ask nobody.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from cachefs.config import launcher_environment
from cachefs.errors import ConfigError, NearflashError, StateError
from cachefs.hashing import name_digest

from .epochs import OrderSettings
from .nodenames import Keys, agree, job_keys, job_store, tell
from .nodes import (
    assign_lanes,
    grouped,
    launched_nodes,
    nodes_of_lanes,
    ranks_of_nodes,
    runs_of_ranks,
    unnamed,
)
from .permute import Int64s
from .workers import Place, find_worker

Nodes: TypeAlias = Sequence[str] | int | None
"""The node's name of each data-parallel rank; or how many nodes there are, each with as many ranks, which follow one
another; or ``None``: as the launcher tells."""
Table: TypeAlias = tuple[str, ...]
_NO_TABLE: Final = 0


class Job(Protocol):
    """What a rank knows of its job: the outside, for tests to replace."""

    def launcher(self) -> dict[str, str]: ...

    def keys(self, world: int, nodes: int) -> Keys | None: ...

    def meeting(self) -> object | None:
        """That through which the ranks meet: another object once they meet anew; ``None`` where they do not."""

    def host(self) -> str: ...

    def in_worker(self) -> bool:
        """Whether this process is a DataLoader worker of the rank."""


class ThisJob:
    """The job of this process."""

    def launcher(self) -> dict[str, str]:
        return launcher_environment()

    def keys(self, world: int, nodes: int) -> Keys | None:
        return job_keys(world, nodes)

    def meeting(self) -> object | None:
        return job_store()

    def host(self) -> str:
        return socket.gethostname()

    def in_worker(self) -> bool:
        return find_worker() is not None


@dataclass(frozen=True, eq=False)
class Split:
    """How batches are divided among nodes: ``node_of_lane`` numbers the node of each lane, ``node`` is this rank's.

    ``runs``: the first of the runs of a batch that ranks of this node take, and how many these are.
    """

    node_of_lane: Int64s
    node: int
    runs: tuple[int, int]

    @property
    def lanes(self) -> Int64s:
        """The lanes of this rank's node."""
        return np.flatnonzero(self.node_of_lane == self.node).astype(np.int64)


class NodeTables:
    """Of one data set. ``nodes`` is the user's argument. A copy knows the tables that the original did."""

    def __init__(self, nodes: Nodes, job: Job | None = None) -> None:
        self._nodes = nodes
        self._job = job or ThisJob()
        self._previous: dict[int, Table] = {}
        self._agreed: dict[tuple[int, int], Table] = {}
        self._told: tuple[int, int, int] | None = None  # process, ranks, nodes
        self._met: weakref.ref[Any] | None = None  # through what it was told and agreed
        self._handed: Table | NearflashError | None = None  # names, to workers
        self._runs: Int64s | None = None
        self._last: tuple[Any, Table] | None = None  # the table made last, and of what

    def count(self, place: Place) -> int:
        """How many nodes there are: the same for all ranks. Raises ``ConfigError`` if that cannot be."""
        nodes, world = self._nodes, place.world
        if nodes is None:
            return launched_nodes(self._job.launcher(), world)
        if not isinstance(nodes, Sequence):
            if world % nodes:
                raise ConfigError(
                    f"{world} ranks cannot be divided among nodes={nodes}", hint="name the node of each rank instead"
                )
            return nodes
        if len(nodes) != world:
            raise ConfigError(f"nodes names the nodes of {len(nodes)} ranks, but there are {world}")
        return len(set(nodes))

    def run(self, place: Place) -> int:
        """Which run of each batch this rank takes."""
        nodes = self._nodes
        self.count(place)
        if not isinstance(nodes, Sequence):
            return place.rank  # ranks of a node follow one another
        if self._runs is None:
            self._runs = runs_of_ranks(nodes)
        return int(self._runs[place.rank])

    def _of_ranks(self, place: Place, names: Table | None) -> Sequence[str]:
        """The node of each rank, by these names (or by numbers) where the user gave none."""
        nodes = self.count(place)
        if isinstance(self._nodes, Sequence):
            return self._nodes
        return grouped(place.world, names or unnamed(nodes))

    # --- names ---

    def tell(self, place: Place) -> None:
        """Tell the others this node's name, if that is for this rank to do; once. Waits for nobody."""
        if isinstance(self._nodes, Sequence) or self._job.in_worker():
            return
        self._meet()
        nodes = self.count(place)
        told = (os.getpid(), place.world, nodes)
        if nodes == 1 or self._told == told:
            return
        keys = self._job.keys(place.world, nodes)
        if keys is None:
            return
        number, first = divmod(place.rank, place.world // nodes)
        if first == 0:
            tell(keys, number, self._job.host())
        self._told = told

    def _meet(self) -> None:
        """Forget what was told and agreed where the ranks met before, once they meet anew: some may be others."""
        meeting = self._job.meeting()
        if meeting is None or self._met is None or self._met() is not meeting:
            self._told, self._agreed = None, {}
            self._met = None if meeting is None else weakref.ref(meeting)

    def hand(self, place: Place) -> None:
        """Agree on names for the workers that are about to be started. They raise what goes wrong here: an error in
        what is called before a fork reaches nobody."""
        if self._job.in_worker():
            return
        self._handed = None
        try:
            self._handed = self._names(place) if self.count(place) > 1 else None
        except NearflashError as e:
            self._handed = e

    def _names(self, place: Place) -> Table | None:
        """The nodes' names as all ranks see them; ``None`` in a worker that was not handed any.

        Without a store to ask they are numbers. Which of these it is follows from the program, which all ranks run.
        """
        if isinstance(self._nodes, Sequence):
            return tuple(ranks_of_nodes(self._of_ranks(place, None)))
        if self._job.in_worker():
            if isinstance(self._handed, NearflashError):
                raise self._handed
            return self._handed
        self._meet()
        key = (place.world, self.count(place))
        if key not in self._agreed:
            keys = self._job.keys(*key)
            if keys is None:
                return unnamed(key[1])
            self.tell(place)
            self._agreed[key] = agree(keys, key[1])
        return self._agreed[key]

    # --- tables ---

    def remember(self, table: Table) -> int:
        """A number for a table that a state brought, to be kept in the settings: the same in every process."""
        if not table:
            return _NO_TABLE
        number = int(name_digest(*table)[:15], 16) or 1
        self._previous[number] = table
        return number

    def table(self, place: Place, settings: OrderSettings) -> Table:
        """The name of each lane's node, for a state; empty with one node that nobody named."""
        if not self._has_table(place, settings):
            return ()
        names = self._names(place)
        if names is None:
            return self._before(settings) or ()
        return self._assigned(place, settings, names)

    def split(self, place: Place, settings: OrderSettings) -> Split | None:
        """How this rank's node shares in the batches; ``None`` where there is one node."""
        if self.count(place) == 1 or not self._has_table(place, settings):
            return None
        names: Table | None = None
        if settings.table != _NO_TABLE:  # else they do not matter
            names = self._names(place)
            if names is None:
                raise StateError(
                    "a state that tells of nodes cannot be loaded in a DataLoader worker whose iterator does not show "
                    "the data set",
                    hint="load it into the data set before the iterator is made, or give nodes= their names",
                )
        of_rank = self._of_ranks(place, names)
        ranks = ranks_of_nodes(of_rank)
        table = self._assigned(place, settings, names)
        node = list(ranks).index(of_rank[place.rank])
        counts = list(ranks.values())
        return Split(nodes_of_lanes(table, ranks), node, (sum(counts[:node]), counts[node]))

    def _has_table(self, place: Place, settings: OrderSettings) -> bool:
        # in the data set's own order no lane is any node's
        return settings.shuffle and (isinstance(self._nodes, Sequence) or self.count(place) > 1)

    def _before(self, settings: OrderSettings) -> Table | None:
        """The table that a state brought. Raises ``StateError`` where it came too late for this process."""
        if settings.table == _NO_TABLE:
            return None
        if settings.table not in self._previous:
            raise StateError(
                "DataLoader's workers were started before a state was loaded that tells of other nodes",
                hint="make a new DataLoader after load_state_dict",
            )
        return self._previous[settings.table]

    def _assigned(self, place: Place, settings: OrderSettings, names: Table | None) -> Table:
        made_of = (place.world, self.count(place), settings.lanes, settings.table, names)
        if self._last is None or self._last[0] != made_of:
            ranks = ranks_of_nodes(self._of_ranks(place, names))
            self._last = made_of, assign_lanes(settings.lanes, ranks, self._before(settings))
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_told": None, "_agreed": {}, "_met": None}  # another process asks for itself
