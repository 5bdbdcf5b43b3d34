"""A filter by metadata: :class:`Where`, of which a data set's plan knows as it knows of shards.

Which samples of a shard are kept is found where the shard is indexed, from the fields that the predicate names and no
others, and is kept beside the shard (:mod:`.derived`). The data set's order, length and states are those of the kept
samples: exact for every number of ranks and workers, and none is read that is not kept.

* An Arrow expression (``pc.field("lang") == "en"``) is evaluated for many samples at once: on the columns of a Parquet
  or Arrow shard as they are stored (not of row groups whose statistics exclude it), of other formats on the scalars
  (numbers, text, bytes, nulls) that their fields are once decoded. A null is not kept.
* A function ``predicate(sample) -> bool`` gets each sample with these fields alone, decoded as ``decode=None`` does.

**Identity.** A filter is part of the data set's digest, so the state of another one is refused. An expression is told
by all that it consists of, with the types of its values. A function is told by its module and name, or by ``name=``,
which lambdas and functions that close over variables need: who changes what a function does gives it another name.
(What is kept beside a shard in the cache is told by the function's code as well, and by the values that it is bound to
when the filter is made, so an edited function is asked anew: see :func:`.where_identity.code_of`. Of functions of other
modules, and of objects that are no plain values, only names and types are told: for these, change ``name=``.)

**Damage.** A sample whose fields cannot be read, or that lacks one of them, keeps its place as a damaged sample does:
it raises when it is read, and is skipped and counted under ``on_error="skip"``. What raises in the predicate itself is
an error at once, whatever ``on_error`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, DataError, MissingField

from ..decode import Decode, Decoder
from ..sample import Sample
from .abc import Damage, Format, Joined, Opened
from .derived import Derived, View
from .table import Table
from .where_expression import Expression, is_expression, listed, parts_of
from .where_identity import called, code_of, expression_identity, function_identity
from .where_index import WhereIndex
from .where_tables import Mask, keeps, keeps_pieces

Predicate: TypeAlias = Expression | Callable[[Sample], Any]

_AT_ONCE = 1 << 16
"""Samples of which the fields are held at a time, for an expression over a format with columns."""


class Where(View):
    """Keep the samples for which ``predicate`` holds: for ``ShardDataset(where=...)``. See the module's text.

    ``fields``: what it reads of a sample; needed for a function, found from an expression's text else. ``name`` stands
    for what the predicate does, in the data set's digest. Raises ``ConfigError`` for a predicate that is neither, and
    for a function that has to be given fields or a name and is not.
    """

    def __init__(self, predicate: Predicate, fields: Sequence[str] | None = None, name: str | None = None) -> None:
        if isinstance(fields, str):
            raise ConfigError(f"fields={fields!r} is one name", hint=f"write fields=[{fields!r}]")
        self.predicate = predicate
        self.fields = None if fields is None else tuple(fields)
        self.name = name
        self.code = ""  #: what else tells a function from what it was before it was edited
        # made once and sent along: in a spawned process the functions of a script are called otherwise
        self.identity: str  #: what stands for it in the data set's digest
        if is_expression(predicate):
            self.identity = expression_identity(predicate, self.fields, name)
            if not parts_of(predicate).fields:
                raise ConfigError(f"the filter {predicate} reads no field", hint="pc.field('name') == value")
        elif callable(predicate):
            if not self.fields:
                raise ConfigError(
                    f"the filter {called(predicate)} does not say which fields it reads",
                    hint="loader.Where(function, fields=[...])",
                )
            self.identity = function_identity(predicate, self.fields, name)
            self.code = code_of(predicate)
        else:
            raise ConfigError(
                f"where={predicate!r} is neither an Arrow expression nor a function",
                hint="pc.field('name') == value, or loader.Where(function, fields=[...])",
            )

    def over(self, format: Format) -> Format:
        return Filtered(format, self)

    @property
    def says(self) -> str:
        """What it is called in messages."""
        return self.name or (str(self.predicate) if is_expression(self.predicate) else called(self.predicate))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Where) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def as_where(value: Any) -> View | None:
    """What ``ShardDataset(where=...)`` was given, as a view: lists of tuples are filters, too, as for
    ``pyarrow`` and ``datasets``. Raises ``ConfigError`` for what cannot be one."""
    if isinstance(value, list):
        return Where(listed(value))
    return value if value is None or isinstance(value, View) else Where(value)


@dataclass(frozen=True)
class Filtered(Derived):
    """The samples of ``inner`` that ``where`` keeps."""

    where: Where

    def identity(self) -> str:
        return f"where {self.where.identity} over {self.inner.identity()}"

    @property
    def kept_as(self) -> str:
        inner = self.inner.kept_as if isinstance(self.inner, Derived) else self.inner.identity()
        return f"where {self.where.identity} as {self.where.code} over {inner}"

    def derive(self, opened: Opened, url: str) -> WhereIndex:
        total = len(opened.index)
        damaged: dict[int, Damage] = {}
        if total == 0:
            kept: Mask = np.zeros(0, np.bool_)
        elif not is_expression(self.where.predicate):
            kept, damaged = self._asked(opened, url)
        elif isinstance(self.inner, Table):
            kept, damaged = keeps_pieces(
                self.where.predicate, self.where.fields, opened.source, opened.index.names, url
            )
        elif self.inner.columnar:
            kept = self._by_columns(opened, url)
        else:
            kept, damaged = self._by_samples(opened, url)
        return WhereIndex.of(opened.index, kept, damaged)

    def recall(self, raw: bytes, inner: Any) -> WhereIndex:
        return WhereIndex.from_bytes(raw, inner)

    def read(self, source: Any, index: WhereIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        if len(index.bad):
            index.refuse(np.array([i]), url)
        return self.inner.read(source, index.inner, index.stored(i), url, fields)

    def columns(
        self,
        source: Any,
        index: WhereIndex,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        index.refuse(rows, url)
        return self.inner.columns(source, index.inner, index.stored_rows(rows), url, fields)

    def lengths(self, source: Any, index: WhereIndex, field: str, url: str) -> npt.NDArray[Any] | None:
        stored = self.inner.lengths(source, index.inner, field, url)
        if stored is None:
            return None
        kept = np.array(stored[index.stored_rows(np.arange(len(index)))], dtype=np.int64)
        kept[index.bad] = -1
        return kept

    def joined(self, source: Any, index: WhereIndex, field: str, url: str) -> Joined | None:
        stored = self.inner.joined(source, index.inner, field, url)
        if stored is None:
            return None
        rows = index.stored_rows(np.arange(len(index)))
        lengths = np.array(stored.lengths[rows], dtype=np.int64)
        lengths[index.bad] = -1
        return stored._replace(starts=stored.starts[rows], lengths=lengths)

    def _asked(self, opened: Opened, url: str) -> tuple[Mask, dict[int, Damage]]:
        """What a function says of each sample."""
        samples = _Fields(self.inner, opened, url, self.where.fields)
        kept = np.zeros(len(opened.index), np.bool_)
        for i, sample in samples:
            try:
                kept[i] = bool(self.where.predicate(sample))
            except Exception as e:  # it is the user's, and may raise whatever it likes
                raise ConfigError(
                    f"the filter {self.where.says} raised {type(e).__name__} at sample {i}: {e}", url=url
                ) from e
        return kept, samples.checked()

    def _by_samples(self, opened: Opened, url: str) -> tuple[Mask, dict[int, Damage]]:
        """An expression over samples that are read one by one."""
        samples = _Fields(self.inner, opened, url, self.where.fields or parts_of(self.where.predicate).fields)
        numbers: list[int] = []
        values: dict[str, list[Any]] = {name: [] for name in samples.asked}
        for i, sample in samples:
            numbers.append(i)
            for name, column in zip(samples.names, values.values(), strict=True):
                column.append(sample[name])
        kept = np.zeros(len(opened.index), np.bool_)
        if numbers:
            kept[numbers] = keeps(self.where.predicate, values, len(numbers), url, f"samples to {numbers[-1]}")
        return kept, samples.checked()

    def _by_columns(self, opened: Opened, url: str) -> Mask:
        names = self.where.fields or parts_of(self.where.predicate).fields
        wanted = frozenset(self.inner.canonical(name) for name in names)
        total = len(opened.index)
        parts = []
        for first in range(0, total, _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, total))
            columns = self.inner.columns(opened.source, opened.index, rows, url, wanted)
            parts.append(keeps(self.where.predicate, columns, len(rows), url, f"samples from {first}"))
        return np.concatenate(parts)


class _Fields:
    """Some fields of a shard's samples, decoded: iterates (number, sample). ``asked``: as they were written, ``names``:
    as the samples have them. ``damaged``: what could not be read; ``lacking``: the first field that was missing, of a
    sample that had none of it."""

    def __init__(self, format: Format, opened: Opened, url: str, names: Sequence[str] | None) -> None:
        self.asked = tuple(dict.fromkeys(names or ()))
        self.names = tuple(map(format.canonical, self.asked))
        self.url, self.format, self.index = url, format, opened.index
        self.decoders: dict[str, Decoder | None] = {}
        self.damaged: dict[int, Damage] = {}
        self.lacking: MissingField | None = None
        self._source = opened.source
        self._decode = Decode(None, format.canonical)

    def __iter__(self) -> Iterator[tuple[int, Sample]]:
        wanted = frozenset(self.names)
        for i in range(len(self.index)):
            try:
                sample = self.format.read(self._source, self.index, i, self.url, wanted)
                absent = next((name for name in self.names if name not in sample), None)
                if absent is not None:
                    self.damaged[i] = self._lacks(i, absent)
                    continue
                self._decode(sample, self, i)
            except DataError as e:
                if isinstance(e, MissingField) and self.lacking is None:
                    self.lacking = e
                self.damaged[i] = Damage(e.what, e.offset or 0, e.hint)
                continue
            yield i, sample

    def _lacks(self, i: int, name: str) -> Damage:
        """Of a sample without a field. What it has instead is looked up for the first such sample alone."""
        if self.lacking is None:
            present = ", ".join(sorted(self.format.read(self._source, self.index, i, self.url)))
            self.lacking = MissingField(
                f"sample {i} has no field {name!r}", url=self.url, hint=f"fields present: {present}"
            )
        return Damage(f"it has no field {name!r}", 0, "Where(fields=[...]) names fields that all samples have")

    def checked(self) -> dict[int, Damage]:
        """The damaged ones. Raises ``MissingField`` where it is all of them, for want of a field."""
        if self.lacking is not None and len(self.damaged) == len(self.index):
            raise self.lacking
        return self.damaged


def unfiltered(format: Format) -> Format:
    """The format whose samples, each as it is there, are filtered; the format itself if it is no filter."""
    while isinstance(format, Filtered):
        format = format.inner
    return format


class Stored(NamedTuple):
    """How :func:`unfiltered` reads samples: its ``index``, in it the number of each sample (``None``: the same), and
    which of them are ``damaged``."""

    index: Any
    rows: npt.NDArray[np.integer[Any]] | None
    damaged: Collection[int]


def stored_in(index: Any) -> Stored:
    """Where samples of this index are stored."""
    rows: npt.NDArray[np.integer[Any]] | None = None
    damaged: Collection[int] = ()
    while isinstance(index, WhereIndex):
        if len(index.bad):  # seldom: then the samples are better looked at one by one
            here = np.arange(len(index)) if rows is None else rows
            damaged = {*damaged, *np.flatnonzero(np.isin(here, index.bad)).tolist()}
        if index.rows is not None:
            rows = index.rows if rows is None else index.rows[rows]
        index = index.inner
    return Stored(index, rows, damaged)
