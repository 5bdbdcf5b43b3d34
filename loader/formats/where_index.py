"""Which samples of a shard a filter keeps: :class:`WhereIndex`, and the bytes that it is kept as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Damage
from .derived import DerivedIndex
from .kept import seal, unseal

Int64s: TypeAlias = npt.NDArray[np.int64]
_VERSION = 1


@dataclass(slots=True)
class WhereIndex(DerivedIndex):
    """The numbers of the kept samples in ``inner``, ascending; ``None`` where all are.

    ``bad``: the numbers here, ascending, of those that are kept though their fields cannot be read; ``why``: of each,
    which of ``damages`` it is.
    """

    inner: Any
    rows: npt.NDArray[np.uint32] | None
    bad: Int64s
    why: Int64s
    damages: tuple[Damage, ...]

    @classmethod
    def of(cls, inner: Any, kept: npt.NDArray[np.bool_], damaged: Mapping[int, Damage]) -> WhereIndex:
        """``kept``: of each stored sample, whether it passes; ``damaged``: those, by number there, that are kept for
        it could not be told."""
        stored = np.array(sorted(damaged), dtype=np.int64)
        kept = kept.copy()
        kept[stored] = True
        numbers = {damage: n for n, damage in enumerate(dict.fromkeys(damaged.values()))}
        why = np.array([numbers[damaged[i]] for i in stored.tolist()], dtype=np.int64)
        return cls._made(inner, kept, stored, why, tuple(numbers))

    @classmethod
    def _made(
        cls, inner: Any, kept: npt.NDArray[np.bool_], stored: Int64s, why: Int64s, damages: tuple[Damage, ...]
    ) -> WhereIndex:
        rows = None if kept.all() else np.flatnonzero(kept).astype(np.uint32)
        bad = stored if rows is None else np.searchsorted(rows, stored)
        return cls(inner, rows, bad.astype(np.int64), why, damages)

    def __len__(self) -> int:
        return len(self.inner) if self.rows is None else len(self.rows)

    @property
    def nbytes(self) -> int:
        own = 0 if self.rows is None else self.rows.nbytes
        return int(self.inner.nbytes) + own + self.bad.nbytes + self.why.nbytes + 300 * len(self.damages) + 500

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the stored samples, and how many could not be looked at."""
        notes: tuple[str, ...] = tuple(self.inner.notes)
        if len(self.bad):
            notes += (
                f"of {len(self.bad)} sample(s) it cannot be told whether they pass the filter, they count as damaged: "
                f"{self.damages[int(self.why[0])].what}",
            )
        return notes

    @property
    def skipped(self) -> int:  # type: ignore[override]
        """Entries of the shard that belong to no sample."""
        return int(self.inner.skipped)

    def stored(self, i: int) -> int:
        """The number in ``inner`` of kept sample ``i``."""
        return i if self.rows is None else int(self.rows[i])

    def stored_rows(self, rows: Int64s) -> Int64s:
        """The same of many."""
        return rows if self.rows is None else self.rows[rows].astype(np.int64)

    def refuse(self, rows: Int64s, url: str) -> None:
        """Raise ``FormatError`` if one of these kept samples is damaged."""
        if not len(self.bad):
            return
        found = np.flatnonzero(np.isin(rows, self.bad))
        if len(found):
            row = int(rows[found[0]])
            damage = self.damages[int(self.why[np.searchsorted(self.bad, row)])]
            raise FormatError(
                f"whether sample {self.stored(row)} passes the filter cannot be told: {damage.what}",
                url=url,
                offset=damage.offset,
                hint=damage.hint,
            )

    def to_bytes(self) -> bytes:
        kept = b""
        if self.rows is not None:
            mask = np.zeros(len(self.inner), np.bool_)
            mask[self.rows] = True
            kept = np.packbits(mask).tobytes()
        return seal(
            _Wire(
                _VERSION,
                len(self.inner),
                len(self),
                kept,
                self.stored_rows(self.bad).tolist(),
                self.why.tolist(),
                [(damage.what, damage.offset, damage.hint) for damage in self.damages],
            )
        )

    @classmethod
    def from_bytes(cls, raw: bytes, inner: Any) -> WhereIndex:
        """What :meth:`to_bytes` wrote for the same ``inner``. The bytes are input from outside: nothing in the result
        points outside of ``inner``. Raises ``ValueError`` for any others."""
        wire = unseal(raw, _Wire, "a kept filter")
        total = len(inner)
        if wire.version != _VERSION or wire.stored != total:
            raise ValueError(f"a kept filter of version {wire.version}, of {wire.stored} samples")
        if wire.kept:
            if len(wire.kept) != -(-total // 8):
                raise ValueError("a kept filter of another length")
            mask = np.unpackbits(np.frombuffer(wire.kept, np.uint8), count=total).astype(np.bool_)
        else:
            mask = np.ones(total, np.bool_)
        bad, why = np.array(wire.bad, np.int64), np.array(wire.why, np.int64)
        sound = (
            len(bad) == len(why)
            and int(mask.sum()) == wire.count
            and bool(((bad >= 0) & (bad < total)).all() and (bad[1:] > bad[:-1]).all() and mask[bad].all())
            and bool(((why >= 0) & (why < len(wire.damages))).all())
        )
        if not sound:
            raise ValueError("a kept filter that does not agree with itself")
        return cls._made(inner, mask, bad, why, tuple(Damage(*damage) for damage in wire.damages))


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Wire(msgspec.Struct, array_like=True):
    version: int
    stored: int
    count: int
    kept: bytes
    bad: list[_Number]
    why: list[_Number]
    damages: list[tuple[str, _Number, str | None]]
