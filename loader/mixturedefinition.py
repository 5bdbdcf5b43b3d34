"""What a mixture is, apart from reading it: its arguments, its sources, and what follows from them at first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cachefs.errors import EmptyDataset

from .batches import Steps, about_steps, steps
from .definition import Definition
from .epochcell import Base, Start
from .epochs import Orders, OrderSettings
from .formats import Format, Tokens
from .keptrows import KeepsRows
from .mixing import BLOCK, Mixing, exact_shares
from .mixtureahead import MixtureAhead
from .mixtureoptions import MixtureOptions
from .mixtureorder import EpochCut, MixtureOrder, MixturePlan, MixtureSettings, MixtureWords, SourceOrders
from .mixturereader import MixtureReader, SourceReader
from .mixturerows import joint
from .mixturestate import base_of, state_of
from .passes import BatchRule, PassPlan
from .planahead import PlanNames
from .samples import Recipe
from .workers import Place, find_place, parent_of_worker

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest


class MixtureDefinition(KeepsRows):
    """A mixture as :class:`loader.plannable.Plannable`. ``sources``: those with a weight other than 0."""

    def __init__(self, options: MixtureOptions, sources: Sequence[Definition]) -> None:
        self.options = options
        self.sources = tuple(sources[at] for at in options.read)
        self.names = tuple(options.names[at] for at in options.read)
        self._settled: tuple[int, Place] | None = None  # by which process
        self._forget()

    def _forget(self) -> None:
        self._manifests: tuple[Manifest, ...] | None = None
        self._shares: tuple[int, ...] | None = None
        self._plan_names = PlanNames()
        self._mixings: dict[tuple[int, int], Mixing] = {}
        self._cuts: dict[tuple[int, int, int], EpochCut] = {}
        self._fresh: dict[int, MixtureSettings] = {}
        self._orders: dict[int, tuple[OrderSettings, SourceOrders]] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("options", "sources", "names", "_settled")
        return {name: value for name, value in self.__dict__.items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # --- who reads, and how an epoch is cut ---

    @property
    def place(self) -> Place:
        """As :attr:`loader.definition.Definition.place`."""
        if self._settled is not None and self._settled[0] == parent_of_worker():
            return self._settled[1]
        options = self.options
        return find_place(options.rank, options.world_size, options.mesh)

    @property
    def global_batch(self) -> int:
        options = self.options
        if options.global_batch_size is not None:
            return options.global_batch_size
        assert options.batch_size is not None  # MixtureOptions checks it
        return options.batch_size * self.place.world

    @property
    def rule(self) -> BatchRule:
        return BatchRule(self.global_batch, self.place, self.options.drop_last, self.options.pad)

    @property
    def steps(self) -> Steps:
        rule = self.rule
        return steps(self.total, rule.global_batch, world=rule.place.world, drop_last=rule.drop_last, pad=rule.pad)

    def steps_of(self, total: int) -> Steps:
        rule = self.rule
        return about_steps(total, rule.global_batch, world=rule.place.world, drop_last=rule.drop_last, pad=rule.pad)

    # --- the sources ---

    def count(self, progress: Callable[[int, int], None] | None = None) -> None:
        for source in self.sources:
            source.count(progress)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The sources' manifests; listed, and counted, at first use."""
        if self._manifests is None:
            self.count()
            manifests = tuple(source.manifest for source in self.sources)
            for name, manifest in zip(self.names, manifests, strict=True):
                if not manifest.total:
                    raise EmptyDataset(f"source {name!r} has no sample", hint="give it weight 0")
            self._manifests = manifests
        return self._manifests

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(manifest.total for manifest in self.manifests)

    @property
    def shares(self) -> tuple[int, ...]:
        """The sources' weights as whole numbers."""
        if self._shares is None:
            self._shares = exact_shares(self.options.weights_of(self.sizes))
        return self._shares

    @property
    def damaged(self) -> Sequence[int]:
        return [shard for source in self.sources for shard in source.damaged]

    @property
    def format(self) -> Format | None:
        """That of token files, where the samples of all sources are windows of one kind, and one client opens them."""
        first, like = self.sources[0], self.recipes()[0]
        if not isinstance(first.format, Tokens):
            return None
        for source, recipe in zip(self.sources, self.recipes(), strict=True):
            client = source.client is first.client or source.client.settings == first.client.settings
            if not client or source.format != first.format or (recipe.fields, recipe.ids) != (like.fields, like.ids):
                return None
        return first.format

    def _windowed(self) -> tuple[Manifest, Client]:
        return joint(self.manifests), self.sources[0].client

    def recipes(self) -> list[Recipe]:
        """How each source's samples are made: as it says, with ids and marks of repeats as the mixture says."""
        options = self.options
        own = [source.recipe for source in self.sources]
        return [replace(recipe, ids=recipe.ids or options.ids, repeats=options.pad) for recipe in own]

    def settle(self) -> None:
        self._settled = (os.getpid(), self.place)
        _ = self.manifests

    def workers_start(self) -> None:
        """Nothing: a mixture's batches are not divided among nodes."""

    # --- the order ---

    @property
    def words(self) -> MixtureWords:
        return MixtureWords(len(self.sources))

    def settings(self, settings: MixtureSettings | None) -> MixtureSettings:
        """Those of a state, else those of a run from the beginning."""
        if settings is not None:
            return settings
        batch = self.global_batch
        if batch not in self._fresh:
            options = self.options
            block = batch if options.within == "batch" else BLOCK
            usual = self.cut(options.seed, block).end(0)
            nothing = tuple(0 for _ in self.sources)
            self._fresh[batch] = MixtureSettings(
                options.seed, block, 0, 0, usual, nothing, self._settings_of_sources(batch)
            )
        return self._fresh[batch]

    def begun(self, settings: MixtureSettings | None, epoch: int) -> MixtureSettings | None:
        """The epoch behind one that is read from its beginning begins where that ends, not where its rest would."""
        if settings is None or epoch != settings.epoch:
            return settings
        return replace(settings, next=settings.begin + self.cut(settings.seed, settings.block).end(0))

    def _settings_of_sources(self, batch: int) -> tuple[OrderSettings, ...]:
        """Each as alone, but for the lanes: where a source does not say how many, the mixture's batch decides."""
        out = []
        for source, manifest in zip(self.sources, self.manifests, strict=True):
            options = source.options
            orders = Orders.begin(
                manifest.counts,
                manifest.sizes,
                batch=batch,
                lanes=options.lanes,
                seed=options.seed,
                block_shards=options.block_shards,
                shuffle=options.shuffle,
                exchange=options.exchange,
                cut=False if manifest.progressive else None,
            )
            out.append(orders.settings)
        return tuple(out)

    def mixing(self, seed: int, block: int) -> Mixing:
        """Which source each position of a sequence is taken from."""
        if (seed, block) not in self._mixings:
            self._mixings[seed, block] = Mixing(self.shares, block, seed)
        return self._mixings[seed, block]

    def cut(self, seed: int, block: int) -> EpochCut:
        """Where the epochs of a sequence end."""
        key = seed, block, self.global_batch
        if key not in self._cuts:
            options, sizes = self.options, self.sizes
            reached: Sequence[int] = ()
            if options.samples is None and options.repeat is None:
                reached = self.mixing(seed, block).reached(sizes)
            self._cuts[key] = EpochCut(options.length(sizes, reached), self.global_batch, options.whole)
        return self._cuts[key]

    def padded(self, cut: EpochCut) -> bool:
        """Whether a pass may end behind the samples of epochs that are cut so."""
        return self.options.pad and (cut.whole is None or cut.end(0) < cut.batch)

    @property
    def total(self) -> int:
        """Positions in a whole epoch."""
        settings = self.settings(None)
        return self.cut(settings.seed, settings.block).end(0)

    def estimated_total(self) -> int:
        return self.total

    def usual_total(self, order: MixtureOrder) -> int:
        return order.usual

    def order(
        self, settings: MixtureSettings | None, epoch: int, *, first: int = 0, upto: int = 0, stop: int | None = None
    ) -> MixtureOrder:
        """An epoch as it is read from ``first`` on; ``stop``: where it ends, if not there where batches do."""
        settings = self.settings(settings)
        cut = self.cut(settings.seed, settings.block)
        total = cut.end(first) if stop is None else cut.length if self.padded(cut) else stop
        mixing = self.mixing(settings.seed, settings.block)
        orders = [self._orders_of(number, of) for number, of in enumerate(settings.sources)]
        return MixtureOrder(mixing, orders, settings, epoch=epoch, total=total, usual=cut.end(0))

    def _orders_of(self, number: int, settings: OrderSettings) -> SourceOrders:
        made = self._orders.get(number)
        if made is None or made[0] != settings:
            manifest = self.manifests[number]
            made = self._orders[number] = settings, SourceOrders(Orders(manifest.counts, manifest.sizes, settings))
        return made[1]

    def plan(self, start: Start) -> MixturePlan:
        stop = start.stop if self.place.world == 1 else None
        order = self.order(start.base.settings, start.epoch, first=start.position, stop=stop)
        return MixturePlan(order, self.rule, start.position, start.stop)

    # --- states ---

    def state(self, base: Base) -> dict[str, Any]:
        return state_of(self, base)

    def base(self, raw: Mapping[str, Any]) -> Base:
        return base_of(self, raw)

    # --- reading ---

    def reader(self, plan: PassPlan[MixtureOrder], *, shared: bool = False) -> MixtureReader:
        readers = [
            SourceReader(source, orders, recipe, shared=shared)
            for source, orders, recipe in zip(self.sources, plan.order.sources, self.recipes(), strict=True)
        ]
        return MixtureReader(readers, self.options.read, ids=self.options.ids)

    def prefetch(self, plan: PassPlan[MixtureOrder]) -> MixtureAhead | None:
        ahead = MixtureAhead(plan.order, plan.position, self.sources, self.manifests, self._plan_names)
        return ahead if ahead.remote else None
