"""Where a run's user is in the order: a small value that loads at any number of ranks, workers, nodes and batch size.

A state says what has been *used*, never how far prefetch is. It is JSON-able (:meth:`LoaderState.to_dict`), and all
functions here are pure: from a state, a number of batches and the orders comes the next state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from cachefs.errors import StateError

from .anchors import Anchor
from .batches import Positions, steps
from .epochs import OrderSettings
from .lanes import ORDER_VERSION
from .order import EpochOrder
from .statefields import MOST as MOST
from .statefields import Fields

STATE_FORMAT: Final = 1
ANCHORED_FORMAT: Final = 2
"""The format of states that tell sample counts (:attr:`LoaderState.known`); those that do not need it are as before."""
_KIND: Final = "nearflash.loader"

OrderOf: TypeAlias = Callable[[int], EpochOrder]
"""An epoch's order; ``loader.epochs.Orders`` is one."""


def settings_to_dict(settings: OrderSettings) -> dict[str, Any]:
    """What fixes an order, as a state tells it."""
    return {
        "seed": settings.seed,
        "lanes": settings.lanes,
        "block_shards": settings.block_shards,
        "shuffle": settings.shuffle,
        "exchange": settings.exchange,
        "balance": settings.balance,
        "cut": settings.cut,
    }


def settings_from_fields(fields: Fields) -> OrderSettings:
    """What :func:`settings_to_dict` told. Raises StateError."""
    return OrderSettings(
        seed=fields.seed("seed"),
        lanes=fields.integer("lanes", 1),
        block_shards=fields.integer("block_shards", 1),
        shuffle=fields.flag("shuffle"),
        exchange=fields.flag("exchange"),
        balance="samples" if fields.choice("balance", ("bytes", "samples")) == "samples" else "bytes",
        cut=fields.flag("cut"),
    )


@dataclass(frozen=True)
class LoaderState:
    """The next sample to use is at ``position`` of ``epoch``; a finished epoch is position 0 of the next.

    ``data`` is the data set's digest. ``table`` names the node of each lane (empty: no nodes). ``next_lane`` and
    ``cursors`` -- per lane the block last read from and how many samples of it are used -- say the same as ``position``
    without needing the counts of shards that lie ahead; :meth:`check` compares the two. ``known``, of a data set that
    is counted while it is read (``progressive``): per lane the samples before that block and then the counts of its
    shards, so that the counts of what is used up are not needed either (``loader.anchors``).
    """

    data: str
    settings: OrderSettings
    epoch: int
    position: int
    next_lane: int
    cursors: tuple[tuple[int, int], ...]
    table: tuple[str, ...] = ()
    progressive: bool = False
    known: tuple[tuple[int, ...], ...] = ()

    @property
    def anchor(self) -> Anchor | None:
        """What the order before this position comes to, where the state tells."""
        if not self.progressive:
            return None
        return Anchor(
            self.position,
            tuple(block for block, _ in self.cursors),
            tuple(lane[0] for lane in self.known),
            tuple(lane[1:] for lane in self.known),
        )

    def at(self, orders: OrderOf, epoch: int, position: int, stop: int | None = None) -> LoaderState:
        """This run's state after ``position`` samples of ``epoch``, which ends at ``stop`` (its end if ``None``).

        A padded pass ends behind the epoch's samples; among its repeats the lanes stand at their ends. Raises DataError
        where missing counts leave open which lane is next.
        """
        order = orders(epoch)
        if order.complete and position >= max(order.total, stop or 0):
            epoch, position = epoch + 1, 0
            order = orders(epoch)
        next_lane, cursors = _cursors(order, position)
        known: tuple[tuple[int, ...], ...] = ()
        if self.progressive:
            anchor = order.anchor_at(_within(order, position))
            known = tuple((before, *counts) for before, counts in zip(anchor.before, anchor.counts, strict=True))
        return replace(
            self, epoch=int(epoch), position=int(position), next_lane=next_lane, cursors=cursors, known=known
        )

    def to_dict(self) -> dict[str, Any]:
        """The state as strings, integers, booleans and lists of them."""
        names = list(dict.fromkeys(self.table))
        place = {name: i for i, name in enumerate(names)}
        known = {"known": [list(lane) for lane in self.known]} if self.progressive else {}
        return {
            "kind": _KIND,
            "format": ANCHORED_FORMAT if self.progressive else STATE_FORMAT,
            "order": ORDER_VERSION,
            "data": self.data,
            **settings_to_dict(self.settings),
            "epoch": self.epoch,
            "position": self.position,
            "next_lane": self.next_lane,
            "cursors": [list(cursor) for cursor in self.cursors],
            "nodes": names,
            "node_of_lane": [place[name] for name in self.table],
            **known,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, data: str | None = None) -> LoaderState:
        """The state that :meth:`to_dict` wrote, here or in another process; lists may have become tuples.

        ``data`` is the digest of the data set it is to be used with. Raises StateError, which names both sides, for
        another data set, a format or an order version that this version does not know, or anything that is no state.
        """
        _check_kind(raw)
        fields = Fields(raw)
        state = cls(
            data=fields.text("data"),
            settings=settings_from_fields(fields),
            epoch=fields.integer("epoch"),
            position=fields.integer("position"),
            next_lane=fields.integer("next_lane"),
            cursors=fields.pairs("cursors"),
            table=fields.table("nodes", "node_of_lane"),
            progressive=raw["format"] == ANCHORED_FORMAT,
            known=fields.lists("known") if raw["format"] == ANCHORED_FORMAT else (),
        )
        lanes = state.settings.lanes
        if state.progressive and len(state.known) != lanes:
            raise StateError(f"the loader state has sample counts of another number of lanes than its {lanes}")
        if len(state.cursors) != lanes or state.next_lane >= lanes or len(state.table) not in (0, lanes):
            raise StateError(f"the loader state has cursors or nodes for another number of lanes than its {lanes}")
        if data is not None and data != state.data:
            raise StateError(
                f"the loader state belongs to data set {state.data}, but this is data set {data}",
                hint="load it with the data it was saved with, or start anew without a state",
            )
        return state

    def check(self, orders: OrderOf, stop: int | None = None) -> None:
        """Raises StateError if the orders put the lanes elsewhere at this position: then sample counts differ.

        ``stop`` as in :meth:`at`. Raises DataError where too many counts are missing to tell.
        """
        order = orders(self.epoch)
        if order.complete and self.position >= max(order.total, stop or 0):
            stands = False
        else:
            stands = _cursors(order, self.position) == (self.next_lane, self.cursors)
        if not stands:
            raise StateError(
                f"the loader state's lanes do not stand where position {self.position} of epoch {self.epoch} puts them",
                hint="the shards' sample counts are not those it was saved with",
            )

    def check_anchor(self, order: EpochOrder) -> None:
        """Raises StateError unless the counts that the state tells lead to its own position. ``order`` goes on from
        them (``anchor``)."""
        anchor = self.anchor
        assert anchor is not None  # the caller looked
        offsets = [offset for _, offset in self.cursors]
        taken = [before + offset for before, offset in zip(anchor.before, offsets, strict=True)]
        fits = all(
            offset <= sum(counts) and (offset > 0) == bool(counts) and (offset > 0 or before == 0)
            for before, offset, counts in zip(anchor.before, offsets, anchor.counts, strict=True)
        )
        if not fits or order.stand(self.position)[0].tolist() != taken:
            raise StateError(
                f"the loader state's sample counts do not lead to its position {self.position}",
                hint="the state is damaged",
            )


def _cursors(order: EpochOrder, position: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    next_lane, blocks, offsets = order.cursors(_within(order, position))
    return next_lane, tuple(zip(blocks.tolist(), offsets.tolist(), strict=True))


def _within(order: EpochOrder, position: int) -> int:
    """Among the repeats of a padded pass the lanes stand at their ends."""
    return min(position, order.total) if order.complete else position


def begin_state(data: str, settings: OrderSettings, orders: OrderOf, table: Sequence[str] = ()) -> LoaderState:
    """The state before the first sample of epoch 0."""
    return LoaderState(data, settings, 0, 0, 0, (), tuple(table)).at(orders, 0, 0)


def advance(
    state: LoaderState,
    batches: int,
    orders: OrderOf,
    *,
    global_batch: int,
    world: int = 1,
    drop_last: bool = True,
    pad: bool = False,
) -> LoaderState:
    """The state after ``batches`` more global batches, over the ends of as many epochs as that takes.

    An epoch ends when it has no further batch, so with ``drop_last=True`` its last samples are passed over. With 0
    batches it only moves a state that another batch size left short of the end into the next epoch. Raises what
    :func:`steps` raises.
    """
    epochs, position = passed(
        orders(state.epoch), state.position, batches, global_batch, world=world, drop_last=drop_last, pad=pad
    )
    return state.at(orders, state.epoch + epochs, position)


def passed(
    order: Positions,
    position: int,
    batches: int,
    global_batch: int,
    *,
    world: int,
    drop_last: bool,
    pad: bool,
    usual: Callable[[], int] | None = None,
) -> tuple[int, int]:
    """How many epochs on, and at which position, a run goes on after ``batches`` batches from ``position`` of one.

    ``usual``: how many positions the epochs behind it have, if not as many.

    Needs no length as long as another whole batch is settled behind them: and does not look at it then, so that what it
    raises of an epoch's end does not depend on what a rank happens to know.
    """
    if position + (batches + 1) * global_batch <= order.settled:
        return 0, position + batches * global_batch
    total = order.total
    rest = steps(total, global_batch, world=world, drop_last=drop_last, pad=pad, start=position).batches
    if batches < rest:
        return 0, position + batches * global_batch
    whole = total if usual is None else usual()
    each = steps(whole, global_batch, world=world, drop_last=drop_last, pad=pad).batches
    epochs, behind = divmod(batches - rest, each)
    return 1 + epochs, behind * global_batch


def _check_kind(raw: Mapping[str, Any]) -> None:
    if not isinstance(raw, Mapping) or raw.get("kind") != _KIND:
        raise StateError(
            "this is not a loader state",
            hint="pass what state_dict() returned; a StatefulDataLoader's goes through state_from()",
        )
    formats = (STATE_FORMAT, ANCHORED_FORMAT)
    for key, name, own in (("format", "state format", formats), ("order", "order version", (ORDER_VERSION,))):
        found = raw.get(key)
        if found not in own or isinstance(found, bool):
            raise StateError(
                f"the loader state has {name} {found!r}, this version of nearflash knows {name} {own[-1]}",
                hint="use the version it was saved with",
            )
