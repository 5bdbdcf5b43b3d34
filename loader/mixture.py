"""The facade of mixtures: :class:`Mixture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cachefs.errors import ConfigError

from .dataset import ShardDataset
from .mixturedefinition import MixtureDefinition
from .mixtureoptions import MixtureOptions, Stop, Weights, by_name
from .mixturestate import remixed
from .planned import PlannedDataset


class Mixture(PlannedDataset):
    """Several data sets read as one, in fixed proportions: as exact, elastic and resumable as each of them.

    A mixture is one sequence of samples, the same for every number of ranks and workers. Which source each is from
    follows from the weights alone: after any 256 samples (with ``within="batch"``: in every global batch) each source
    has had its share, to within two samples. The samples of a source come in that source's own order, all of them once
    in each of its own epochs; a small source is begun again, shuffled anew, as often as that takes.

    ``sources``: a dict of :class:`loader.ShardDataset` by name, or a list of them (then named ``"0"``, ``"1"`` ...),
    each with its own format, fields, decoding, transform, seed and order; their batch sizes and ranks say nothing here.

    ``weights``: how much of each, as a list or a dict by name; they need not sum up to 1, and a source with 0 is not
    even listed. Without, sources are mixed by their sizes. ``repeat``: instead, how often each is read in an epoch
    (0.5: half of it). ``temperature``: weights (sizes, if there are none) to the power 1/T.

    Where an epoch ends: ``stop="all"`` (the default), once every source has been read at least once; ``"first"``, when
    one has; ``samples=N``, after so many; with ``repeat``, after the repeats. It is cut to whole batches (``"all"`` and
    ``repeat``: the last one is filled) unless ``drop_last=False`` or ``pad=True`` ask for a short or a padded one.
    Sources do not restart with the mixture's epoch: the next one goes on where this one ended, so nothing is left out.

    ``batch_size`` or ``global_batch_size``, ``drop_last``, ``pad``, ``rank``, ``world_size``, ``mesh``: as in
    :class:`loader.ShardDataset`. ``seed``: of the mixing. ``ids``: samples have ``__source__``, the number of their
    source in :attr:`names`, and ``__id__``, their number in it.

    All sources are counted before the first batch, which fetches those that no index tells the counts of.
    """

    _definition: MixtureDefinition

    def __init__(
        self,
        sources: Mapping[str, ShardDataset] | Sequence[ShardDataset],
        *,
        weights: Weights | None = None,
        repeat: Weights | None = None,
        temperature: float | None = None,
        stop: Stop | None = None,
        samples: int | None = None,
        within: Literal["any", "batch"] = "any",
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        drop_last: bool = True,
        pad: bool = False,
        ids: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
    ) -> None:
        by = sources if isinstance(sources, Mapping) else {str(number): one for number, one in enumerate(sources)}
        for name, source in by.items():
            if not isinstance(name, str):
                raise ConfigError(f"the source name {name!r} is no text")
            if not isinstance(source, ShardDataset):
                raise ConfigError(f"source {name!r} of the mixture is a {type(source).__name__}, no ShardDataset")
        names = tuple(by)
        options = MixtureOptions(
            names=names,
            weights=by_name("weights", names, weights),
            repeat=by_name("repeat", names, repeat),
            temperature=temperature,
            stop=stop,
            samples=samples,
            within=within,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            drop_last=drop_last,
            pad=pad,
            ids=ids,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
        )
        super().__init__(MixtureDefinition(options, [source._definition for source in by.values()]))

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names, in the order of their numbers in ``__source__``."""
        return self._definition.options.names

    @property
    def proportions(self) -> dict[str, float]:
        """The part of each source in the mixture; they sum up to 1. Counts the sources where that is needed."""
        shares = dict(zip(self._definition.names, self._definition.shares, strict=True))
        whole = sum(shares.values())
        return {name: shares.get(name, 0) / whole for name in self.names}

    def remixed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of this mixture made of that of another one: with other weights, or with sources added or left out.

        Pass it to :meth:`load_state_dict`, which refuses another mixture's. Sources go by their names: each that both
        have goes on where it stood, in its own epoch and order; a new one begins. The mixture's next epoch begins (the
        same one if it had not begun). Raises ``StateError`` where a name is that of other data than it was.
        """
        return remixed(self._definition, state)

    def __repr__(self) -> str:
        return f"<Mixture of {', '.join(self.names)}>"
