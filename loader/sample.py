"""What the loader hands out: :class:`Sample` and :class:`Batch`, and the :class:`Stamp` that says where they stand."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from cachefs.errors import MissingField


class Stamp(NamedTuple):
    """Where one rank's part of one global batch stands in the order.

    All samples of that part share one stamp. ``end`` is the global position behind the batch: a run that has used the
    batch goes on there. ``size`` is the number of samples in this rank's part. ``stop``: where the pass ends, if
    that is not what its start and batch size say (see ``loader.passes``).
    """

    epoch: int
    end: int
    size: int
    stop: int | None = None


class _Stamped(dict[str, Any]):
    stamp: Stamp | None = None
    _thing: ClassVar[str]

    def __missing__(self, key: str) -> Any:
        present = ", ".join(sorted(map(str, self))) or "none"
        raise MissingField(f"no field {key!r} in the {self._thing}", hint=f"fields present: {present}")


class Sample(_Stamped):
    """One training example: field name -> value.

    A plain ``dict`` otherwise, except that asking for an absent field raises :class:`MissingField` with the list of
    those present. Values read without decoding are 1-D ``uint8`` numpy views into the mapped shard: private, writable
    memory that lives as long as the view does.
    """

    _thing = "sample"


class Batch(_Stamped):
    """Several samples, field by field: a stacked tensor where shapes agree, else a list in sample order."""

    _thing = "batch"
