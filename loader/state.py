"""Where a run's user is in the order: a small value that loads at any number of ranks, workers, nodes and batch size.

A state says what has been *used*, never how far prefetch is. It is JSON-able (:meth:`LoaderState.to_dict`), and all
functions here are pure: from a state, a number of batches and the orders comes the next state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from cachefs.errors import StateError

from .batches import steps
from .epochs import OrderSettings
from .lanes import ORDER_VERSION
from .order import EpochOrder

STATE_FORMAT: Final = 1
MOST: Final = 2**48
"""No number in a state is larger, but for the seed: computing with them stays within 64 bits."""
SEEDS: Final = range(-(2**63), 2**64)
_KIND: Final = "nearflash.loader"

OrderOf: TypeAlias = Callable[[int], EpochOrder]
"""An epoch's order; ``loader.epochs.Orders`` is one."""


@dataclass(frozen=True)
class LoaderState:
    """The next sample to use is at ``position`` of ``epoch``; a finished epoch is position 0 of the next.

    ``data`` is the data set's digest. ``table`` names the node of each lane (empty: no nodes). ``next_lane`` and
    ``cursors`` -- per lane the block last read from and how many samples of it are used -- say the same as ``position``
    without needing the counts of shards that lie ahead; :meth:`check` compares the two.
    """

    data: str
    settings: OrderSettings
    epoch: int
    position: int
    next_lane: int
    cursors: tuple[tuple[int, int], ...]
    table: tuple[str, ...] = ()

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
        return replace(self, epoch=int(epoch), position=int(position), next_lane=next_lane, cursors=cursors)

    def to_dict(self) -> dict[str, Any]:
        """The state as strings, integers, booleans and lists of them."""
        names = list(dict.fromkeys(self.table))
        place = {name: i for i, name in enumerate(names)}
        settings = self.settings
        return {
            "kind": _KIND,
            "format": STATE_FORMAT,
            "order": ORDER_VERSION,
            "data": self.data,
            "seed": settings.seed,
            "lanes": settings.lanes,
            "block_shards": settings.block_shards,
            "shuffle": settings.shuffle,
            "exchange": settings.exchange,
            "balance": settings.balance,
            "cut": settings.cut,
            "epoch": self.epoch,
            "position": self.position,
            "next_lane": self.next_lane,
            "cursors": [list(cursor) for cursor in self.cursors],
            "nodes": names,
            "node_of_lane": [place[name] for name in self.table],
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, data: str | None = None) -> LoaderState:
        """The state that :meth:`to_dict` wrote, here or in another process; lists may have become tuples.

        ``data`` is the digest of the data set it is to be used with. Raises StateError, which names both sides, for
        another data set, a format or an order version that this version does not know, or anything that is no state.
        """
        _check_kind(raw)
        fields = _Fields(raw)
        state = cls(
            data=fields.text("data"),
            settings=OrderSettings(
                seed=fields.seed("seed"),
                lanes=fields.integer("lanes", 1),
                block_shards=fields.integer("block_shards", 1),
                shuffle=fields.flag("shuffle"),
                exchange=fields.flag("exchange"),
                balance="samples" if fields.choice("balance", ("bytes", "samples")) == "samples" else "bytes",
                cut=fields.flag("cut"),
            ),
            epoch=fields.integer("epoch"),
            position=fields.integer("position"),
            next_lane=fields.integer("next_lane"),
            cursors=fields.pairs("cursors"),
            table=fields.table("nodes", "node_of_lane"),
        )
        lanes = state.settings.lanes
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


def _cursors(order: EpochOrder, position: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    next_lane, blocks, offsets = order.cursors(min(position, order.total) if order.complete else position)
    return next_lane, tuple(zip(blocks.tolist(), offsets.tolist(), strict=True))


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
    total = orders(state.epoch).total
    rest = steps(total, global_batch, world=world, drop_last=drop_last, pad=pad, start=state.position).batches
    if batches < rest:
        return state.at(orders, state.epoch, state.position + batches * global_batch)
    each = steps(total, global_batch, world=world, drop_last=drop_last, pad=pad).batches
    epochs, behind = divmod(batches - rest, each)
    return state.at(orders, state.epoch + 1 + epochs, behind * global_batch)


def _check_kind(raw: Mapping[str, Any]) -> None:
    if not isinstance(raw, Mapping) or raw.get("kind") != _KIND:
        raise StateError("this is not a loader state", hint="pass what state_dict() returned")
    for key, name, own in (("format", "state format", STATE_FORMAT), ("order", "order version", ORDER_VERSION)):
        found = raw.get(key)
        if found != own:
            raise StateError(
                f"the loader state has {name} {found!r}, this version of nearflash knows {name} {own}",
                hint="use the version it was saved with",
            )


class _Fields:
    """Typed access to the fields of a state that came from outside."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def _wrong(self, name: str, wanted: str) -> StateError:
        return StateError(f"the loader state's field {name!r} is not {wanted}", hint="the state is damaged")

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "a boolean")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in options:
            raise self._wrong(name, f"one of {', '.join(options)}")
        return value

    def integer(self, name: str, least: int = 0) -> int:
        value = self._raw.get(name)
        if not _is_integer(value, least):
            raise self._wrong(name, f"an integer from {least} to 2**48")
        return int(value)  # type: ignore[arg-type]

    def seed(self, name: str) -> int:
        value = self._raw.get(name)
        if not is_seed(value):
            raise self._wrong(name, "an integer of 64 bits")
        return int(value)  # type: ignore[arg-type]

    def _list(self, name: str) -> list[Any]:
        value = self._raw.get(name)
        if not isinstance(value, list | tuple):
            raise self._wrong(name, "a list")
        return list(value)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        out = []
        for pair in self._list(name):
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(_is_integer(value) for value in pair)):
                raise self._wrong(name, "a list of pairs of integers")
            out.append((pair[0], pair[1]))
        return tuple(out)

    def table(self, names: str, places: str) -> tuple[str, ...]:
        nodes, table = self._list(names), self._list(places)
        if not all(isinstance(node, str) for node in nodes):
            raise self._wrong(names, "a list of strings")
        if not all(_is_integer(place) and place < len(nodes) for place in table):
            raise self._wrong(places, f"a list of places in {names!r}")
        return tuple(nodes[place] for place in table)


def is_seed(value: object) -> bool:
    """Whether it can seed an order: an integer of 64 bits, signed or not."""
    return isinstance(value, int) and not isinstance(value, bool) and value in SEEDS


def _is_integer(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST
