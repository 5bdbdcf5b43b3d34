"""What a data set is, apart from reading it: its options, and what follows from them at first use.

Shared by the facade, its batched view and the workers. Nothing is read or asked before it is needed; what was found is
kept, and travels to spawned workers, so that they neither list nor count again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.ma  # noqa: F401 - np.unique imports it at first use, which in forked workers comes in every epoch

from cachefs.client import connect  # here, not at first use, for the same reason
from cachefs.errors import ConfigError

from .anchors import Anchor
from .batches import Positions, Steps, about_steps, steps
from .buffers import IndexCache, ShardPool, Shards
from .counted import CountedShards
from .decode import Decode
from .epochcell import Base, Start
from .epochs import Orders, OrderSettings
from .formats import Format
from .growing import GrowingOrders
from .keptrows import KeepsRows
from .lookahead import Lookahead
from .manifest import Manifest, build_manifest
from .manifest_file import SUFFIX, parse_manifest
from .nodeplan import NodePlan
from .nodetables import NodeTables
from .options import Options
from .order import EpochOrder
from .passes import BatchRule, PassPlan
from .planahead import PlanAhead, PlanNames
from .samples import Recipe, SampleReader
from .settingwords import OrderWords
from .shardstates import base_of, state_of
from .sharedpool import SharedPool
from .shelf import SharedNumbers, Shelf
from .tally import Tally
from .workers import Place, find_place, parent_of_worker

if TYPE_CHECKING:
    from cachefs.client import Client

log = logging.getLogger("loader")

_LEAST_AHEAD = 16


class Definition(KeepsRows):
    """Options and what they lead to. Picklable (options permitting); a copy keeps what has been found so far."""

    def __init__(self, options: Options, client: Client | None) -> None:
        self.options = options
        self._client = client
        self._settled: tuple[int, Place] | None = None  # by which process
        self._manifest: Manifest | None = None
        self._orders: tuple[Any, Orders | GrowingOrders] | None = None
        self._shelf = Shelf()
        self._numbers = SharedNumbers()
        self._tally: Tally | None = None
        self._anchor: tuple[OrderSettings, int, Anchor] | None = None  # of which epoch
        self.nodes = NodeTables(options.nodes)
        self.indexes = IndexCache()
        self._plan_names = PlanNames()

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect()
        return self._client

    @property
    def place(self) -> Place:
        """Asked for anew each time: ``torch.distributed`` may be set up after the data set was made.

        A DataLoader worker that was started anew knows nothing of it and takes what the process that made it knew.
        """
        if self._settled is not None and self._settled[0] == parent_of_worker():
            return self._settled[1]
        options = self.options
        return find_place(options.rank, options.world_size, options.mesh)

    @property
    def global_batch(self) -> int:
        options = self.options
        if options.global_batch_size is not None:
            return options.global_batch_size
        assert options.batch_size is not None  # Options checks it
        return options.batch_size * self.place.world

    @property
    def listing(self) -> Manifest:
        """Listed at first use, and counted unless it is progressive, by one of the processes that share this object by
        fork."""
        if self._manifest is None:
            with self._shelf.held():
                found = self._shelf.read()
                if found:
                    self._manifest = Manifest.from_bytes(found, self.options.format, self.options.views)
                else:
                    self._manifest = self._build()
                    self._shelf.write(self._manifest.to_bytes())
        return self._manifest

    @property
    def tally(self) -> Tally | None:
        """The counts of a progressive data set; ``None`` for one that is counted before the first batch."""
        if self._tally is None and self.listing.progressive:
            self._tally = Tally(
                self.listing, self.client, self._numbers, on_error=self.options.on_error, indexes=self.indexes
            )
            if self.place.world > 1 and not self._tally.complete:
                log.info(
                    "%d shards have no known sample counts: each node indexes them itself, while it reads",
                    len(self.listing.shards) - self._tally.known,
                )
        return self._tally

    @property
    def manifest(self) -> Manifest:
        """The shards with the counts that are known now."""
        listing, tally = self.listing, self.tally
        if tally is None:
            return listing
        return replace(listing, counts=tally.counts(), damaged=tally.damaged(), skipped=tally.skipped)

    @property
    def format(self) -> Format:
        """The format of all samples."""
        return self.listing.format

    @property
    def total(self) -> int:
        """Samples in an epoch. Raises ``CountsUnknown`` while shards are not counted."""
        return self.manifest.total

    @property
    def damaged(self) -> Sequence[int]:
        """Shards that count as empty."""
        return list(self.listing.damaged) if self.tally is None else list(self.tally.damaged())

    def count(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count all shards that are not."""
        if self.tally is not None:
            self.tally.count(progress)

    def estimated_total(self) -> int:
        """About how many samples there are: by bytes, where shards are not counted."""
        tally, sizes = self.tally, self.listing.sizes
        if tally is None:
            return self.listing.total
        order = sizes.argsort()[::-1]  # of an empty shard nothing could be told
        counts = tally.counts()
        for number in order.tolist():
            if (counts > 0).any() or (counts >= 0).all():
                break
            tally.need(order[order == number])
            counts = tally.counts()
        known = counts >= 0
        samples, size = int(counts[known].sum()), int(sizes[known].sum())
        return samples + round(int(sizes[~known].sum()) * samples / max(size, 1))

    def _build(self) -> Manifest:
        options = self.options
        source = options.source
        if isinstance(source, str) and source.endswith(SUFFIX):
            return parse_manifest(self.client.read(source), source, options.format, options.views)
        return build_manifest(
            options.source,
            self.client,
            format=options.format,
            on_error=options.on_error,
            indexes=self.indexes,
            views=options.views,
        )

    @property
    def rule(self) -> BatchRule:
        place = self.place
        return BatchRule(self.global_batch, place, self.options.drop_last, self.options.pad, self.nodes.run(place))

    @property
    def steps(self) -> Steps:
        """A whole epoch's batches. Raises ``CountsUnknown`` while shards are not counted."""
        return self.steps_of(self.manifest.total)

    def steps_of(self, total: int) -> Steps:
        """The batches of an epoch of so many samples; none is refused while that is a guess."""
        rule, cut = self.rule, steps if self.tally is None or self.tally.complete else about_steps
        return cut(total, rule.global_batch, world=rule.place.world, drop_last=rule.drop_last, pad=rule.pad)

    def order(self, settings: OrderSettings | None, epoch: int, *, first: int = 0, upto: int = 0) -> EpochOrder:
        """An epoch's order with the positions from ``first`` to before ``upto``, as far as the epoch has them.

        ``settings`` of a state, or ``None``: those that the options lead to. A progressive data set's order may lack
        others; it waits until the counts for these are known.
        """
        orders = self.orders(settings)
        return orders(epoch) if isinstance(orders, Orders) else orders.reaching(epoch, first=first, upto=upto)

    def settings(self, settings: OrderSettings | None) -> OrderSettings:
        """Those of a state, else those that the options lead to."""
        return self.orders(None).settings if settings is None else settings

    def orders(self, settings: OrderSettings | None) -> Orders | GrowingOrders:
        """The orders under the settings of a state, or those that the options lead to."""
        key = settings if settings is not None else (self.global_batch, self.nodes.count(self.place))
        if self._orders is None or self._orders[0] != key:
            self._orders = (key, self._made(settings))
        return self._orders[1]

    def _made(self, settings: OrderSettings | None) -> Orders | GrowingOrders:
        listing, tally = self.listing, self.tally
        orders = self._begin() if settings is None else Orders(listing.counts, listing.sizes, settings)
        if tally is None:
            return orders
        anchor = self._anchor
        told = None if anchor is None or anchor[0] != orders.settings else anchor[1:]
        return GrowingOrders(orders, tally, listing.sizes, told)

    def go_on_from(self, settings: OrderSettings, epoch: int, anchor: Anchor) -> None:
        """Take what a state tells of counts: from there on those of what is used up are not needed."""
        self._anchor = (settings, epoch, anchor)
        self._orders = None

    def _begin(self) -> Orders:
        options, listing = self.options, self.listing
        if options.balance == "samples" and listing.progressive:
            raise ConfigError(
                'balance="samples" needs the shards\' sample counts, and this data set is counted while it is read',
                hint='use balance="bytes"',
            )
        return Orders.begin(
            listing.counts,
            listing.sizes,
            batch=self.global_batch,
            nodes=self.nodes.count(self.place),
            lanes=options.lanes,
            seed=options.seed,
            block_shards=options.block_shards,
            shuffle=options.shuffle,
            exchange=options.exchange,
            balance=options.balance,
            cut=False if listing.progressive else None,
        )

    def usual_total(self, order: Positions) -> int:
        """How many positions the other epochs have: as many."""
        return order.total

    @property
    def words(self) -> OrderWords:
        """How settings are kept in memory shared with workers."""
        return OrderWords()

    def begun(self, settings: OrderSettings | None, epoch: int) -> OrderSettings | None:
        """As they are: they say nothing of positions."""
        return settings

    def state(self, base: Base) -> dict[str, Any]:
        """The state of a run that goes on at ``base``."""
        return state_of(self, base)

    def base(self, raw: Mapping[str, Any]) -> Base:
        """The base that a state names, checked against the data. Raises ``StateError``."""
        return base_of(self, raw)

    def plan(self, start: Start) -> PassPlan[EpochOrder]:
        """The pass that begins there. Does not wait for counts."""
        place = self.place
        self.nodes.tell(place)
        order = self.order(start.base.settings, start.epoch, first=start.position)
        reach = None if self.tally is None else partial(self.order, start.base.settings, start.epoch)
        split = self.nodes.split(place, self.settings(start.base.settings))
        if split is None:
            return PassPlan(order, self.rule, start.position, start.stop, reach)
        return NodePlan(order, self.rule, start.position, start.stop, reach, split=split)

    def reader(self, plan: PassPlan[EpochOrder], *, shared: bool = False) -> SampleReader:
        """A reader with fresh maps for one pass; the caller's to close. ``shared``: several threads may use it."""
        return self.reader_of(plan.order, self.recipe, shared=shared)

    def reader_of(self, order: EpochOrder, recipe: Recipe, *, shared: bool = False) -> SampleReader:
        """As :meth:`reader`, for any epoch, and for samples made in any way."""
        wide = order.plan.lanes * (order.block_shards + 1) if order.shuffle else 4
        kind = SharedPool if shared else ShardPool
        pool = kind(self._shards(order), self.client, capacity=wide, indexes=self.indexes)
        return SampleReader(pool, recipe, seed=order.seed, epoch=order.epoch)

    def _shards(self, order: EpochOrder) -> Shards:
        listing = self.listing
        if order.shuffle and listing.format.base is not listing.format:
            listing = replace(listing, format=listing.format.in_epoch(order.seed, order.epoch))
        return listing if self.tally is None else CountedShards(listing, self.tally, order.told())

    def _windowed(self) -> tuple[Manifest, Client]:
        return self.listing, self.client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None, "_tally": None, "_orders": None}

    def prefetch(self, plan: PassPlan[EpochOrder]) -> PlanAhead | Lookahead | None:
        """What asks for the next shards; ``None`` where they are local files whose counts are known, or no objects."""
        listing = self.listing
        remote = any("://" in stat.url for stat in listing.shards[:1]) and not listing.format.folder
        lanes = plan.lanes() if isinstance(plan, NodePlan) else None
        ahead = max(_LEAST_AHEAD, 2 * (plan.order.plan.lanes if lanes is None else len(lanes)))
        assert self._orders is not None  # the plan was made from them
        after = partial(self._orders[1].whole, plan.order.epoch + 1)
        follow = partial(PlanAhead, self.client, listing, after=after, names=self._plan_names, ahead=ahead, lanes=lanes)
        if self.tally is not None:
            return Lookahead(
                plan, listing, self.tally, self.client, ahead=ahead, remote=remote, follow=follow, lanes=lanes
            )
        return follow(plan.order, min(plan.position, plan.order.total)) if remote else None

    @property
    def recipe(self) -> Recipe:
        options = self.options
        canonical = self.listing.format.canonical
        fields = None if options.fields is None else tuple(canonical(name) for name in options.fields)
        return Recipe(
            decode=Decode(options.decode, canonical),
            fields=fields,
            transform=options.transform,
            ids=options.ids,
            repeats=options.pad,
            on_error=options.on_error,
        )

    def settle(self) -> None:
        """Find now what workers would otherwise each find for themselves, and what a spawned one could not."""
        self._settled = (os.getpid(), self.place)
        self.orders(None)
        self.workers_start()

    def workers_start(self) -> None:
        """Find what DataLoader workers cannot ask for: they share no connection with the process that starts them."""
        self.nodes.hand(self.place)
