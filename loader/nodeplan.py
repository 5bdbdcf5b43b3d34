"""A pass of a rank on one of several nodes: inside each batch the positions are ordered by the node of their lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batches import rank_positions
from .nodetables import Split
from .order import EpochOrder
from .passes import PassPlan
from .permute import Int64s
from .samples import Places


@dataclass(frozen=True, kw_only=True)
class NodePlan(PassPlan[EpochOrder]):
    """See the module's text."""

    split: Split

    def positions(self, batch: int) -> Int64s:
        first = self.position + batch * self.rule.global_batch
        behind = first + self.rule.global_batch
        order = self.reaching(behind)
        # what comes before the place where a state left off, which the repeats of a padded batch also do
        early = first < order.floor or (order.floor > 0 and behind > order.settled)
        if early and self.reach is not None:
            order = self.reach(first=0, upto=behind)
        return self._runs(order, first, self.rule.run, 1)

    def _runs(self, order: EpochOrder, first: int, run: int, runs: int) -> Int64s:
        rule = self.rule
        return rank_positions(
            order,
            0,
            global_batch=rule.global_batch,
            rank=run,
            runs=runs,
            world=rule.place.world,
            node_of_lane=self.split.node_of_lane,
            start=first,
            pad=rule.pad,
        )

    def _neighbours(self, batches: range) -> Places | None:
        return None

    def _whole(self, batches: range) -> Int64s:
        """As long as the same lanes take turns and a batch is some of their rounds, a batch is the one before, moved
        along."""
        size, parts, at = self.rule.global_batch, [], 0
        while at < len(batches):
            first = self.position + batches[at] * size
            end, lanes = self.latest.turns(first)
            alike = 1
            if size % lanes == 0:
                alike = min(max((end - first - size) // (batches.step * size) + 1, 1), len(batches) - at)
            parts.append(self._moved(self.positions(batches[at]), alike, batches.step))
            at += alike
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def lanes(self) -> Int64s:
        """What is worth asking for ahead: the node's lanes, and others of which its ranks take samples at the start.

        Where lanes and ranks do not divide evenly, or lanes have ended, a node takes some samples of its neighbours'
        lanes. Those of lanes that are not among these are fetched when they are needed.
        """
        split, order = self.split, self.latest
        if self.position + self.rule.global_batch > order.settled:
            return split.lanes
        return np.union1d(split.lanes, order.lane_of(self._runs(order, self.position, *split.runs)))
