"""What can be read by a plan: all that a data set's passes, epochs and states need to know of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .batches import Steps
    from .epochcell import Base, Start
    from .formats import Format, Tokens
    from .mixturereader import MixtureReader
    from .passes import BatchRule, Order, PassPlan
    from .rowgather import WindowRows
    from .samples import SampleReader
    from .settingwords import Words
    from .workers import Place


class Ahead(Protocol):
    """Asks for what a pass reads next."""

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""

    def close(self) -> None:
        """The pass is over."""


class Plannable(Protocol):
    """A data set apart from reading it, for :class:`loader.planned.PlannedDataset`.

    :class:`loader.definition.Definition` is one, of shards; :class:`loader.mixturedefinition.MixtureDefinition` is
    another, of several of these. Nothing is listed or read before it is asked for. Picklable. ``settings`` are what
    fixes the order, of a kind of its own; ``None`` stands for those that its arguments lead to.
    """

    @property
    def place(self) -> Place:
        """Which data-parallel rank this is, asked for anew each time."""

    @property
    def rule(self) -> BatchRule:
        """How an epoch is cut into batches."""

    @property
    def total(self) -> int:
        """Samples in an epoch, over all ranks. Raises ``CountsUnknown`` while that is not known."""

    @property
    def steps(self) -> Steps:
        """A whole epoch's batches. Raises as :attr:`total` does."""

    def steps_of(self, total: int) -> Steps:
        """The batches of an epoch of so many samples; none is refused while that is a guess."""

    def count(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count all shards that are not."""

    def estimated_total(self) -> int:
        """About how many samples an epoch has."""

    @property
    def words(self) -> Words:
        """How settings are kept in memory shared with workers."""

    def begun(self, settings: Any, epoch: int) -> Any:
        """A state's settings once ``epoch`` is to be read from its beginning."""

    @property
    def damaged(self) -> Sequence[Any]:
        """The shards that count as empty."""

    @property
    def format(self) -> Format | None:
        """The format of all samples, where they have one."""

    def settle(self) -> None:
        """Find now what workers would otherwise each find for themselves, and what a spawned one could not."""

    def workers_start(self) -> None:
        """Workers are about to be started: find what none of them could."""

    # --- the order ---

    def order(self, settings: Any, epoch: int, *, first: int = 0, upto: int = 0) -> Order:
        """An epoch's order, to be read from ``first`` on, with at least the positions from there to before ``upto``."""

    def plan(self, start: Start) -> PassPlan[Any]:
        """The pass that begins there. Does not wait for counts."""

    def usual_total(self, order: Any) -> int:
        """How many positions the epochs behind that of ``order`` have, once they are read from their beginning."""

    # --- states ---

    def state(self, base: Base) -> dict[str, Any]:
        """The state of a run that goes on at ``base``."""

    def base(self, raw: Mapping[str, Any]) -> Base:
        """The base that a state names, checked against the data. Raises ``StateError``."""

    # --- reading ---

    def reader(self, plan: PassPlan[Any], *, shared: bool = False) -> SampleReader | MixtureReader:
        """A reader with fresh maps for one pass; the caller's to close. ``shared``: several threads may use it."""

    def prefetch(self, plan: PassPlan[Any]) -> Ahead | None:
        """What asks for the next shards; ``None`` where there is nothing to ask for."""

    def take_rows(self, format: Tokens, capacity: int) -> WindowRows:
        """What gathers the windows of token files, for one pass, with so many shards open at a time."""

    def keep_rows(self, rows: WindowRows, capacity: int) -> None:
        """Take it back, for the next pass."""
