"""What a pass asks for ahead where the data set is counted while it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .order import EpochOrder
from .passes import PassPlan
from .permute import Int64s
from .planahead import PlanAhead
from .tally import Tally

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest


class Lookahead:
    """Has the next blocks' shards counted (which fetches them), and asks the client for those that are counted.

    Once all are counted the rest of the pass goes by a plan, which ``follow`` makes. ``ahead``: how many shards beyond
    those in use are asked for. ``remote``: whether there is anything to fetch. ``lanes``: those of the node, if it is
    not to have all. Counts are needed of all lanes.
    """

    def __init__(
        self,
        plan: PassPlan[EpochOrder],
        manifest: Manifest,
        tally: Tally,
        client: Client,
        *,
        ahead: int,
        remote: bool,
        follow: Callable[[EpochOrder, int], PlanAhead],
        lanes: Int64s | None = None,
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._tally = tally
        self._client = client
        self._ahead = ahead
        self._remote = remote
        self._follow = follow
        self._planned: PlanAhead | None = None
        self._lanes = lanes
        self._order: EpochOrder | None = None
        self._next = 0
        self._asked = np.zeros(len(manifest.shards), dtype=np.bool_)
        self._leave_out = plan.latest.used_up(min(plan.position, plan.latest.settled))

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""
        if self._planned is not None:
            self._planned.reach(position)
            return
        order = self._plan.latest
        if order is self._order and position < self._next:
            return
        self._order = order
        self._next = position + max(1, (order.settled - position) // 8)
        self._tally.want(self, order.to_count(position, self._manifest.sizes))
        if self._remote and order.complete:
            self._planned = self._follow(order, min(position, order.settled))
            self._planned.reach(position)
        elif self._remote:
            self._ask(order, min(position, order.settled))

    def _ask(self, order: EpochOrder, position: int) -> None:
        uses = order.uses_from(position, self._lanes)
        begun = int(np.searchsorted(uses.first, position, side="right"))
        wanted = uses.shard[: begun + self._ahead]
        wanted = wanted[~self._asked[wanted] & ~np.isin(wanted, self._leave_out)]
        if wanted.size:
            self._client.prefetch([self._manifest.stat(number) for number in wanted.tolist()])
            self._asked[wanted] = True

    def close(self) -> None:
        """Have nothing more counted for this pass."""
        self._tally.forget(self)
        if self._planned is not None:
            self._planned.close()
