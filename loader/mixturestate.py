"""The state of a mixture: as a dict that JSON can hold, from where a run goes on, and back. No reading.

Beside the position it holds, of each source, what the order of that data set alone is made by, and its own epoch and
position: enough for a mixture with other weights, or with more sources, to go on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cachefs.errors import StateError

from .epochcell import Base
from .epochs import OrderSettings
from .lanes import ORDER_VERSION
from .mixing import MIXING_VERSION, MOST_SHARES
from .mixtureorder import MixtureSettings
from .state import settings_from_fields, settings_to_dict
from .statefields import MOST, STOP, WORKER, Fields

if TYPE_CHECKING:
    from .mixturedefinition import MixtureDefinition

_KIND: Final = "nearflash.mixture"
_FORMAT: Final = 1
_MOST_BLOCK: Final = 2**22
_MOST_LANES: Final = 2**20
"""More than any mixture has, and few enough that the arrays made of them are small."""


@dataclass(frozen=True)
class SourceState:
    """One source: the next sample of it is at ``position`` of its epoch ``epoch``."""

    name: str
    share: int
    data: str
    settings: OrderSettings
    epoch: int
    position: int

    def taken(self, size: int) -> int:
        """How many samples of the source, which has ``size``, were read in the run. Raises ``StateError``."""
        count = self.epoch * size + self.position
        if self.position >= size or count > MOST:
            raise StateError(
                f"the state's source {self.name!r} stands at sample {self.position} of {size} in epoch {self.epoch}",
                hint="the state is damaged",
            )
        return count

    def check(self, digest: str) -> None:
        """Raises ``StateError`` unless it is of the data with that digest."""
        if self.data != digest:
            raise StateError(
                f"the state's source {self.name!r} is data set {self.data}, but here it is data set {digest}",
                hint="load it with the data it was saved with, or give other data another name and use remixed(state)",
            )


@dataclass(frozen=True)
class MixtureState:
    """The next sample is at ``position`` of ``epoch``, which begins at position ``begin`` of the sequence."""

    seed: int
    block: int
    epoch: int
    position: int
    begin: int
    sources: tuple[SourceState, ...]
    stop: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The state as strings, integers, booleans, and lists and dicts of them."""
        out: dict[str, Any] = {
            "kind": _KIND,
            "format": _FORMAT,
            "order": ORDER_VERSION,
            "mixing": MIXING_VERSION,
            "seed": self.seed,
            "block": self.block,
            "epoch": self.epoch,
            "position": self.position,
            "begin": self.begin,
            "sources": [_source_to_dict(source) for source in self.sources],
        }
        return out if self.stop is None else {**out, STOP: self.stop}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> MixtureState:
        """What :meth:`to_dict` wrote. Raises ``StateError`` for anything else."""
        _check_kind(raw)
        fields = Fields(raw)
        sources = raw.get("sources")
        if not isinstance(sources, list | tuple) or not all(isinstance(source, Mapping) for source in sources):
            raise StateError(
                "the mixture state's field 'sources' is not a list of sources", hint="the state is damaged"
            )
        state = cls(
            seed=fields.seed("seed"),
            block=_small(fields, "block", _MOST_BLOCK),
            epoch=fields.integer("epoch"),
            position=fields.integer("position"),
            begin=fields.integer("begin"),
            sources=tuple(_source_from_dict(source) for source in sources),
            stop=None if raw.get(STOP) is None else fields.integer(STOP, fields.integer("position") + 1),
        )
        if not 0 < sum(source.share for source in state.sources) <= MOST_SHARES:
            raise StateError("the mixture state's shares cannot be those of a mixture", hint="the state is damaged")
        if state.begin + max(state.position, state.stop or 0) > MOST:
            raise StateError("the mixture state's position is beyond every sequence", hint="the state is damaged")
        return state

    def check(self, names: Sequence[str], shares: Sequence[int], digests: Sequence[str]) -> None:
        """Raises ``StateError``, which says what differs, unless it is of the mixture with these sources."""
        own = [source.name for source in self.sources]
        hint = "load what mixture.remixed(state) gives, to go on with other weights or sources"
        if own != list(names):
            raise StateError(f"the state is of a mixture of {_listed(own)}, not of {_listed(names)}", hint=hint)
        for source, digest in zip(self.sources, digests, strict=True):
            source.check(digest)
        if [source.share for source in self.sources] != list(shares):
            before, now = _weights([source.share for source in self.sources]), _weights(shares)
            raise StateError(f"the state is of a mixture with weights {before}, this one has {now}", hint=hint)


def _source_to_dict(source: SourceState) -> dict[str, Any]:
    return {
        "name": source.name,
        "share": source.share,
        "data": source.data,
        "epoch": source.epoch,
        "position": source.position,
        **settings_to_dict(source.settings),
    }


def _source_from_dict(raw: Mapping[str, Any]) -> SourceState:
    fields = Fields(raw)
    _small(fields, "lanes", _MOST_LANES)
    return SourceState(
        name=fields.text("name"),
        share=fields.integer("share"),
        data=fields.text("data"),
        settings=settings_from_fields(fields),
        epoch=fields.integer("epoch"),
        position=fields.integer("position"),
    )


def _small(fields: Fields, name: str, most: int) -> int:
    value = fields.integer(name, 1)
    if value > most:
        raise StateError(f"the mixture state's field {name!r} is {value}, above {most}", hint="the state is damaged")
    return value


def _check_kind(raw: Any) -> None:
    if not isinstance(raw, Mapping) or raw.get("kind") != _KIND:
        raise StateError(
            "this is not the state of a mixture",
            hint="pass what its state_dict() returned; a StatefulDataLoader's goes through state_from()",
        )
    versions = (("format", _FORMAT), ("order", ORDER_VERSION), ("mixing", MIXING_VERSION))
    for name, known in versions:
        found = raw.get(name)
        if found != known or isinstance(found, bool):
            raise StateError(
                f"the mixture state has {name} {found!r}, this version of nearflash knows {name} {known}",
                hint="use the version it was saved with",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _weights(shares: Sequence[int]) -> str:
    return "[" + ", ".join(f"{share / max(sum(shares), 1):.6g}" for share in shares) + "]"


def state_of(mixture: MixtureDefinition, base: Base) -> dict[str, Any]:
    """The state of a run that goes on at ``base``."""
    settings = mixture.settings(base.settings)
    order = mixture.order(settings, base.epoch, first=base.position, stop=base.stop)
    sources = []
    for number, count in enumerate(order.taken(min(base.position, order.total)).tolist()):
        epoch, position = divmod(count, mixture.sizes[number])
        name, share, data = mixture.names[number], mixture.shares[number], mixture.manifests[number].digest
        sources.append(SourceState(name, share, data, settings.sources[number], epoch, position))
    return MixtureState(
        settings.seed, settings.block, base.epoch, base.position, order.begin, tuple(sources), base.stop
    ).to_dict()


def base_of(mixture: MixtureDefinition, raw: Mapping[str, Any]) -> Base:
    """The base that a state names, checked against the sources. Raises ``StateError``."""
    state = MixtureState.from_dict(raw)
    state.check(mixture.names, mixture.shares, [manifest.digest for manifest in mixture.manifests])
    cut, world = mixture.cut(state.seed, state.block), mixture.place.world
    position, stop = state.position, state.stop
    padded = mixture.padded(cut)
    if stop is not None and world > 1:  # many ranks end where batches do, and leave repeats, too few for them
        position, stop = min(position, cut.length) if padded else position, None
    if stop is not None:
        end = cut.length if padded else stop
    else:  # a shorter epoch than the one it was saved in may be over
        end = max(cut.end(position), position)
    settings = MixtureSettings(
        seed=state.seed,
        block=state.block,
        epoch=state.epoch,
        begin=state.begin,
        next=state.begin + end,
        offsets=_offsets(mixture, state, state.begin + min(position, end)),
        sources=tuple(source.settings for source in state.sources),
    )
    return Base(state.epoch, position, settings, stop)


def _offsets(mixture: MixtureDefinition, state: MixtureState, position: int) -> tuple[int, ...]:
    """What each source had been read before the sequence began, by what it had after so many positions."""
    taken = mixture.mixing(state.seed, state.block).taken(position).tolist()
    out = []
    for source, size, count in zip(state.sources, mixture.sizes, taken, strict=True):
        out.append(source.taken(size) - count)
        if out[-1] < 0:
            among = (
                "it may be of the repeats of an epoch: load it with the samples= (or stop=) and pad= it was saved with"
            )
            raise StateError(
                f"the state's source {source.name!r} does not stand where position {position} puts it",
                hint="the state is damaged" if state.stop is None else among,
            )
    return tuple(out)


def remixed(mixture: MixtureDefinition, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The state of ``mixture`` in which each source goes on where it stood in the state of another one."""
    if isinstance(raw, Mapping) and raw.get(WORKER) is not None:  # which stands at the beginning of the worker's pass
        raise StateError(
            "this is the state of one DataLoader worker",
            hint="make a state that loads anywhere with state_from or state_after of the mixture it was saved in",
        )
    state = MixtureState.from_dict(raw)
    known = {source.name: source for source in state.sources}
    fresh = mixture.settings(None)
    offsets, settings = list(fresh.offsets), list(fresh.sources)
    for number, (name, manifest) in enumerate(zip(mixture.names, mixture.manifests, strict=True)):
        if name in known:
            known[name].check(manifest.digest)
            offsets[number] = known[name].taken(manifest.total)
            settings[number] = known[name].settings
    epoch = state.epoch + (state.position > 0)
    begun = replace(fresh, epoch=epoch, offsets=tuple(offsets), sources=tuple(settings))
    return state_of(mixture, Base(epoch, 0, begun))
