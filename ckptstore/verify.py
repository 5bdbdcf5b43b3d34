"""Reading a commit record and proving that everything below it is there: by size, or byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import xxhash

from cachefs.errors import CheckpointDamaged, CheckpointNotFound, CheckpointUnsupported, NotFound

from .layout import StepRef, resolve
from .manifest import Part, PartRef, Root, TensorEntry, decode_part, decode_root, segment_names
from .parallel import run_bounded
from .storage import Storage

WINDOW = 8 << 20
"""Bytes read at a time; :data:`.parallel.WORKERS` of them are in memory."""


@dataclass(frozen=True)
class Damage:
    """One thing wrong with a checkpoint: in which file (name from the root), at which byte, and, where it can be
    told, of which tensor."""

    file: str
    tensor: str | None
    what: str
    offset: int | None = None

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        return f"{where}: {self.what}" + (f" (tensor {self.tensor!r})" if self.tensor is not None else "")


@dataclass(frozen=True)
class Span:
    """One chunk within a file."""

    start: int
    end: int
    digest: str
    tensor: str


@dataclass(frozen=True)
class Window:
    """Chunks of one file that are read together: bytes ``[start, end)`` in one go, or one large chunk in several."""

    file: str
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def end(self) -> int:
        return max(span.end for span in self.spans)


def is_committed(storage: Storage, ref: StepRef) -> bool:
    """Whether there is a checkpoint: a manifest (sound or not) and no tombstone. Raises what the storage raises."""
    try:
        data = storage.read(ref.manifest)
    except NotFound:
        return False
    try:
        if not isinstance(decode_root(data, ref, url=storage.describe(ref.manifest)), Root):
            return False
    except (CheckpointDamaged, CheckpointUnsupported):
        pass  # it was committed; what is wrong with it is told to whoever reads it
    return not _has(storage, ref.tombstone)


def read_root(storage: Storage, ref: StepRef) -> Root:
    """The commit record of a step.

    Raises :class:`CheckpointNotFound` if the step was never committed or is deleted, :class:`CheckpointDamaged`, or
    :class:`CheckpointUnsupported`.
    """
    url = storage.describe(ref.manifest)
    try:
        root = decode_root(storage.read(ref.manifest), ref, url=url)
    except NotFound as e:
        raise CheckpointNotFound(f"there is no {ref}", url=storage.url) from e
    if not isinstance(root, Root) or _has(storage, ref.tombstone):
        raise CheckpointNotFound(f"{ref} is deleted", url=storage.url)
    return root


def read_part(storage: Storage, ref: StepRef, part: PartRef) -> Part:
    """One part, its digest checked. Raises :class:`CheckpointDamaged` (also if it is missing)."""
    name = f"{ref.folder}/{part.file}"
    url = storage.describe(name)
    try:
        data = storage.read(name)
    except NotFound as e:
        raise CheckpointDamaged("a part is missing", url=url) from e
    return decode_part(data, part, url=url)


def read_parts(storage: Storage, root: Root) -> list[Part]:
    """All parts of a checkpoint in the root's order, read in parallel; errors as :func:`read_part`."""
    return list(run_bounded(lambda part: read_part(storage, root.ref, part), root.parts))


def verify_step(
    storage: Storage, ref: StepRef, deep: bool = True, *, on_bytes: Callable[[int], None] = lambda count: None
) -> list[Damage]:
    """Everything that is wrong with a checkpoint; an empty list means it is sound.

    Checked are the root, the parts (size and digest), that the chunks of every tensor cover it once by number of
    elements, and the size of every segment; with ``deep`` also the digest of every chunk, in parallel, with a few
    windows of :data:`WINDOW` bytes in memory; ``on_bytes`` hears, in the caller's thread, how many more were read.
    Raises :class:`CheckpointNotFound` if there is no such step, :class:`CheckpointUnsupported`, and the storage's own
    errors (no answer is not damage).
    """
    try:
        root = read_root(storage, ref)
    except CheckpointDamaged as e:
        return [Damage(ref.manifest, None, e.what)]
    damages: list[Damage] = []
    parts: list[Part] = []
    for outcome in run_bounded(lambda part: _try_part(storage, ref, part), root.parts):
        if isinstance(outcome, Damage):
            damages.append(outcome)
        else:
            parts.append(outcome)
    if not damages:
        damages.extend(uncovered(parts, ref))
    expected: dict[str, int] = {}
    for part in parts:
        expected.update(segment_names(part, ref))
    actual = _sizes(storage, expected)
    for name, size in sorted(expected.items()):
        found = actual.get(name)
        if found != size:
            what = "the segment is missing" if found is None else f"the segment has {found} bytes instead of {size}"
            damages.append(Damage(name, None, what))
    if deep:
        windows = plan_windows(parts, ref, actual)
        for size, found_damages in run_bounded(lambda window: _check_window(storage, window), windows):
            damages.extend(found_damages)
            on_bytes(size)
        damages.extend(_beyond(parts, ref, actual))
    return damages


def uncovered(parts: Iterable[Part], ref: StepRef) -> list[Damage]:
    """Tensors whose chunks, over all parts, do not add up to their shape, or that differ between parts."""
    totals: dict[tuple[str, int | None], tuple[TensorEntry, int]] = {}
    damages: list[Damage] = []
    for part in parts:
        for tensor in part.tensors:
            if tensor.alias_of is not None:
                continue
            key = (tensor.name, tensor.per_rank)
            known, total = totals.get(key, (tensor, 0))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                damages.append(Damage(ref.manifest, tensor.name, "two parts give it different shapes or dtypes"))
            totals[key] = known, total + sum(prod(chunk.shape) for chunk in tensor.chunks)
    for (name, _), (tensor, total) in totals.items():
        if total != prod(tensor.shape):
            damages.append(Damage(ref.manifest, name, f"the chunks hold {total} of {prod(tensor.shape)} elements"))
    return damages


def plan_windows(parts: Iterable[Part], ref: StepRef, sizes: dict[str, int], window: int = WINDOW) -> Iterator[Window]:
    """All chunks that lie within their file, grouped so that small neighbours are read together. Pure.

    A group spans at most ``window`` bytes unless it is a single chunk.
    """
    by_file: dict[str, list[Span]] = {}
    for part in parts:
        for tensor in part.tensors:
            for chunk in tensor.chunks:
                name = resolve(ref, chunk.file)
                if chunk.end <= sizes.get(name, -1):
                    by_file.setdefault(name, []).append(Span(chunk.start, chunk.end, chunk.digest, tensor.name))
    for name, spans in sorted(by_file.items()):
        spans.sort(key=lambda span: (span.start, span.end))
        group: list[Span] = []
        end = 0
        for span in spans:
            end = max(end, span.end)
            if group and end - group[0].start > window:
                yield Window(name, tuple(group))
                group, end = [], span.end
            group.append(span)
        if group:
            yield Window(name, tuple(group))


def _beyond(parts: Iterable[Part], ref: StepRef, sizes: dict[str, int]) -> Iterator[Damage]:
    """Chunks that end after their file does; a missing file is reported once elsewhere."""
    for part in parts:
        for tensor in part.tensors:
            for chunk in tensor.chunks:
                name = resolve(ref, chunk.file)
                if name in sizes and chunk.end > sizes[name]:
                    yield Damage(name, tensor.name, "the file ends before this chunk does", chunk.start)


def _check_window(storage: Storage, window: Window) -> tuple[int, list[Damage]]:
    """The bytes of a window's chunks, and what is wrong with them."""
    size = sum(span.end - span.start for span in window.spans)
    try:
        if len(window.spans) == 1:
            digests = [_digest(storage, window.file, window.start, window.end)]
        else:
            view = memoryview(storage.read_range(window.file, window.start, window.end)).cast("B")
            digests = [
                xxhash.xxh3_128_hexdigest(view[span.start - window.start : span.end - window.start])
                for span in window.spans
            ]
    except (NotFound, CheckpointDamaged) as e:  # gone or cut since its size was read
        return size, [Damage(window.file, span.tensor, e.what, span.start) for span in window.spans]
    return size, [
        Damage(window.file, span.tensor, "the digest is wrong", span.start)
        for span, digest in zip(window.spans, digests, strict=True)
        if digest != span.digest
    ]


def _digest(storage: Storage, name: str, start: int, end: int) -> str:
    """xxh3-128 of a range of any length, one window in memory."""
    hasher = xxhash.xxh3_128()
    for position in range(start, end, WINDOW):
        hasher.update(storage.read_range(name, position, min(end, position + WINDOW)))
    return hasher.hexdigest()


def _sizes(storage: Storage, names: Iterable[str]) -> dict[str, int]:
    """The sizes of those files that exist: one listing per step folder, however many files."""
    folders = sorted({name.rpartition("/")[0] for name in names})
    listings = run_bounded(lambda folder: storage.list(f"{folder}/"), folders)
    return {info.name: info.size for listing in listings for info in listing}


def _try_part(storage: Storage, ref: StepRef, part: PartRef) -> Part | Damage:
    try:
        return read_part(storage, ref, part)
    except CheckpointDamaged as e:
        return Damage(f"{ref.folder}/{part.file}", None, e.what)


def _has(storage: Storage, name: str) -> bool:
    try:
        storage.size(name)
    except NotFound:
        return False
    return True
