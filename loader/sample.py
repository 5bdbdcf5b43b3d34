"""What the loader hands out: :class:`Sample` and :class:`Batch`, and the :class:`Stamp` that says where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cachefs.errors import MissingField

if TYPE_CHECKING:
    from typing import Self


class Stamp(NamedTuple):
    """Where one rank's part of one global batch stands in the order.

    All samples of that part share one stamp. ``end`` is the global position behind the batch: a run that has used the
    batch goes on there. ``size`` is the number of samples in this rank's part. ``stop``: where the pass ends, if
    that is not what its start and batch size say (see ``loader.passes``). ``repeats``: how many samples at the end of
    the global batch are repeats (``pad=True``).
    """

    epoch: int
    end: int
    size: int
    stop: int | None = None
    repeats: int = 0


class _Stamped(dict[str, Any]):
    stamp: Stamp | None = None
    _thing: ClassVar[str]

    def __missing__(self, key: str) -> Any:
        present = ", ".join(sorted(map(str, self))) or "none"
        raise MissingField(f"no field {key!r} in the {self._thing}", hint=f"fields present: {present}")


class Rows(NamedTuple):
    """A field of a whole batch that its samples are views of: the tensor, and its rows as the samples have them."""

    tensor: Any
    views: list[Any]


class Sample(_Stamped):
    """One training example: field name -> value.

    A plain ``dict`` otherwise, except that asking for an absent field raises :class:`MissingField` with the list of
    those present (``get`` and ``in`` are a dict's). Values read without decoding are 1-D ``uint8`` numpy views into the
    mapped shard: private, writable memory that lives as long as the view does.
    """

    _thing = "sample"
    rows: dict[str, Rows] | None = None
    """On the first sample of a batch: the fields that were made for all of the batch at once."""

    def __getstate__(self) -> dict[str, Any]:
        return {"stamp": self.stamp}  # a copy of one sample takes no others along


class Batch(_Stamped):
    """Several samples, field by field: a stacked tensor where shapes agree, else a list in sample order."""

    _thing = "batch"

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """This batch with its tensors on a device, those in its lists and mappings too.

        Lightning, accelerate and others move a batch by this method; moved by its items it would lose its stamp.
        """
        from .transfer import on_tensors  # which needs torch

        moved: Self = on_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return moved


class _Folded(_Stamped):
    """Names are in lower case, and are found however they are written: ``sample["JPG"]`` is ``sample["jpg"]``."""

    def __missing__(self, key: str) -> Any:
        folded = _folded(key)
        return self[folded] if super().__contains__(folded) else super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or super().__contains__(_folded(key))

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return value if value is not default else super().get(_folded(key), default)


class FoldedSample(_Folded, Sample):
    """A sample of a format in which the case of field names is no matter (tar members)."""


class FoldedBatch(_Folded, Batch):
    """A batch of :class:`FoldedSample`."""


def batch_type(samples: Sequence[Any]) -> type[Batch]:
    """What a batch of these is."""
    return FoldedBatch if samples and isinstance(samples[0], FoldedSample) else Batch


def _folded(key: Any) -> Any:
    return key.lower() if isinstance(key, str) else key
