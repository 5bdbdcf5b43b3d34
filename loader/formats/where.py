"""A filter by metadata: :class:`Where`, of which a data set's plan knows as it knows of shards.

Which samples of a shard are kept is found where the shard is indexed, from the fields that the predicate names and no
others, and is kept beside the shard (:mod:`.derived`). The data set's order, length and states are those of the kept
samples: exact for every number of ranks and workers, and none is read that is not kept.

* An Arrow expression (``pc.field("lang") == "en"``) is evaluated for many samples at once: on the columns of a Parquet
  or Arrow shard as they are stored (not of row groups whose statistics exclude it), of other formats on the scalars
  (numbers, text, bytes, nulls) that their fields are once decoded. A null is not kept.
* A function ``predicate(sample) -> bool`` gets each sample with these fields alone, decoded as ``decode=None`` does.

**Identity.** A filter is part of the data set's digest, so the state of another one is refused. An expression is told
by its text. A function is told by its module and name, or by ``name=``, which lambdas and functions that close over
variables need: who changes what a function does gives it another name. (What is kept beside a shard in the cache is
told by the function's code as well, so an edited function is asked anew; of functions that it calls nothing is known.)

**Damage.** A sample whose fields cannot be read, or that lacks one of them, keeps its place as a damaged sample does:
it raises when it is read, and is skipped and counted under ``on_error="skip"``. What raises in the predicate itself is
an error at once, whatever ``on_error`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, DataError, MissingField
from cachefs.hashing import name_digest

from ..decode import Decode, Decoder
from ..sample import Sample
from .abc import Damage, Format, Joined, Opened
from .derived import Derived, View
from .table import Table
from .where_index import WhereIndex
from .where_tables import Expression, Mask, keeps, keeps_pieces, named_in

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
        if is_expression(predicate):
            text = _text(predicate)
        elif callable(predicate):
            if not self.fields:
                raise ConfigError(
                    f"the filter {_called(predicate)} does not say which fields it reads",
                    hint="loader.Where(function, fields=[...])",
                )
            text = _told(predicate, name)
        else:
            raise ConfigError(f"where={predicate!r} is neither an Arrow expression nor a function")
        given = "" if self.fields is None else f" of {', '.join(sorted(self.fields))}"
        named = "" if name is None else f" named {name}"
        # made once and sent along: in a spawned process the functions of a script are called otherwise
        self.identity = f"{text}{given}{named}"  #: what stands for it in the data set's digest

    def over(self, format: Format) -> Format:
        return Filtered(format, self)

    @property
    def says(self) -> str:
        """What it is called in messages."""
        return self.name or (str(self.predicate) if is_expression(self.predicate) else _called(self.predicate))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Where) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def as_where(value: Any) -> View | None:
    """What ``ShardDataset(where=...)`` was given, as a view. Raises ``ConfigError`` for what cannot be one."""
    return value if value is None or isinstance(value, View) else Where(value)


def is_expression(value: Any) -> bool:
    """Whether this is an expression of Arrow's, without importing its library."""
    kind = type(value)
    return kind.__name__ == "Expression" and kind.__module__.partition(".")[0] == "pyarrow"


def _text(expression: Expression) -> str:
    """The expression's text, which leaves out some of a long list of values: then with a digest of all of it."""
    text = " ".join(str(expression).split())
    if "FieldPath(" in text:
        raise ConfigError(f"where={text} names a field by its number", hint="name it: pc.field('name')")
    if "..." in text:
        text += f" {name_digest(expression.__reduce__()[1][0].to_pybytes().hex())}"
    return text


def _told(function: Callable[..., Any], name: str | None) -> str:
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    plain = (
        isinstance(qualified, str) and "<lambda>" not in qualified and getattr(function, "__closure__", None) is None
    )
    if name is None and not (plain and hasattr(function, "__code__") and not hasattr(function, "__self__")):
        raise ConfigError(
            f"the filter {_called(function)} has no name that tells what it does",
            hint="give one that changes with it: loader.Where(function, fields=[...], name='caption-length-1')",
        )
    if name is not None:
        return "function"
    return str(qualified) if module in (None, "__main__", "__mp_main__") else f"{module}.{qualified}"


def code_of(function: Any) -> str:
    """What tells a function from what it was before somebody edited it, as far as its own code and constants tell. It
    differs between versions of Python, so it is no part of a data set's digest."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return ""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values = (
        _constant(code),
        [_constant(value) for value in (*cells, *(getattr(function, "__defaults__", None) or ()))],
    )
    return name_digest(repr(values))


def _constant(value: Any) -> Any:
    """A value as what its ``repr`` tells; of objects that have no lasting one, their type."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_constant(part) for part in value.co_consts]
    if isinstance(value, tuple):
        return [_constant(part) for part in value]
    if isinstance(value, frozenset):
        return sorted(repr(_constant(part)) for part in value)
    return value if isinstance(value, str | bytes | int | float | complex | type(None)) else type(value).__qualname__


def _called(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


@dataclass(frozen=True)
class Filtered(Derived):
    """The samples of ``inner`` that ``where`` keeps."""

    where: Where

    def identity(self) -> str:
        return f"where {self.where.identity} over {self.inner.identity()}"

    @property
    def kept_as(self) -> str:
        inner = self.inner.kept_as if isinstance(self.inner, Derived) else self.inner.identity()
        return f"where {self.where.identity} as {code_of(self.where.predicate)} over {inner}"

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
        samples = _Fields(self.inner, opened, url, self.where.fields or self._named(opened, url))
        numbers: list[int] = []
        values: dict[str, list[Any]] = {name: [] for name in samples.names}
        for i, sample in samples:
            numbers.append(i)
            for name, column in values.items():
                column.append(sample[name])
        kept = np.zeros(len(opened.index), np.bool_)
        if numbers:
            kept[numbers] = keeps(self.where.predicate, values, len(numbers), url, f"samples to {numbers[-1]}")
        return kept, samples.checked()

    def _by_columns(self, opened: Opened, url: str) -> Mask:
        names = self.where.fields or self._named(opened, url)
        wanted = frozenset(self.inner.canonical(name) for name in names)
        total = len(opened.index)
        parts = []
        for first in range(0, total, _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, total))
            columns = self.inner.columns(opened.source, opened.index, rows, url, wanted)
            parts.append(keeps(self.where.predicate, columns, len(rows), url, f"samples from {first}"))
        return np.concatenate(parts)

    def _named(self, opened: Opened, url: str) -> tuple[str, ...]:
        """The fields that an expression reads, found by the first sample that can be read."""
        first: DataError | None = None
        for i in range(len(opened.index)):
            try:
                present = self.inner.read(opened.source, opened.index, i, url)
            except DataError as e:
                first = first or e
                continue
            named = named_in(self.where.predicate, present)
            if named:
                return tuple(named)
            raise MissingField(
                f"sample {i} has no field that the filter {self.where.predicate} names",
                url=url,
                hint=f"fields present: {', '.join(sorted(present)) or 'none'}",
            )
        assert first is not None
        raise first


class _Fields:
    """Some fields of a shard's samples, decoded: iterates (number, sample). ``damaged``: what could not be read;
    ``lacking``: the first field that was missing, of a sample that had none of it."""

    def __init__(self, format: Format, opened: Opened, url: str, names: Sequence[str] | None) -> None:
        self.names = tuple(format.canonical(name) for name in names or ())
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
                absent = [name for name in self.names if name not in sample]
                if absent:
                    present = ", ".join(sorted(self.format.read(self._source, self.index, i, self.url)))
                    raise MissingField(
                        f"sample {i} has no field {absent[0]!r}", url=self.url, hint=f"fields present: {present}"
                    )
                self._decode(sample, self, i)
            except DataError as e:
                if isinstance(e, MissingField) and self.lacking is None:
                    self.lacking = e
                self.damaged[i] = Damage(e.what, e.offset or 0, e.hint)
                continue
            yield i, sample

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
