"""TFRecord files, as TensorFlow's ``RecordWriter`` makes them (``tensorflow/core/lib/io/record_writer.h``).

A record is its length (uint64), the masked CRC-32C of these eight bytes, the payload and the payload's masked CRC-32C,
all little-endian. Records follow each other with nothing between them and nothing at the end. The file as a whole may
be compressed: gzip and zlib as TensorFlow does (``"GZIP"``, ``"ZLIB"``), and also bzip2 and Zstandard.

A sample is one record: the field ``record``, a view of the payload's bytes. With ``TFRecord(example=True)`` the payload
is read as a ``tf.train.Example`` and the fields are its features (see :mod:`.example`); neither TensorFlow nor protobuf
is needed.

On purpose different from TensorFlow:

* The checksums of all lengths are checked while the file is indexed, so a cut or overwritten file is an error before
  its first record is handed out. A payload's checksum is checked each time it is read, and fails that record alone: the
  next one is found all the same. ``verify=False`` leaves the payloads' checksums unchecked (the lengths' never).
* No compression type is to be given; the bytes tell.
* A file of 0 bytes is an empty TFRecord file there and here, but it does not tell what it is: only where the format is
  given (``format="tfrecord"``) it has no samples.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes, Format, KeptIndex, Ready, all_there
from .crc32c import crc32c, masked_lengths, unmasked
from .example import read_example
from .magic import is_zlib
from .offsets import OffsetIndex, joined, offset_dtype
from .packed import unpack, unzlib
from .varint import WireError

_HEAD = 12
"""Bytes before a payload: its length and the length's sum."""
_TAIL = 4
_FRAME = _HEAD + _TAIL
_AHEAD = 4 << 20
"""Bytes that are waited for at a time, while the shard is still being fetched."""
_BATCH = 4096
"""Records, or somewhat more, whose lengths are checked at once."""
_BLOCK, _LINE = 256 << 10, 64
_SPARSE = 4096
"""Bytes; headers less far apart than this are walked faster where the processor's cache was filled first: each header
says where the next one is, so that no two waits for memory overlap."""
_FIRST_RUN = 16
_RECORD = "record"
_length_at = struct.Struct("<Q").unpack_from
_sum_at = struct.Struct("<I").unpack_from


class RecordIndex(OffsetIndex):
    """Record ``i`` lies, frame and all, in the bytes ``offsets[i] .. offsets[i + 1]``."""

    __slots__ = ()
    kind: ClassVar[str] = "tfrecord"
    least: ClassVar[int] = _FRAME


@dataclass(frozen=True)
class TFRecord(Format):
    """Options of the format. ``example``: payloads are ``tf.train.Example`` messages, whose features become fields.
    ``verify``: check the sum of each payload that is read."""

    name: ClassVar[str] = "tfrecord"
    streams: ClassVar[bool] = True
    kept_index: ClassVar[type[KeptIndex] | None] = RecordIndex
    example: bool = False
    verify: bool = True

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        if _is_header(head):
            return True
        if not is_zlib(head):
            return False
        try:
            return _is_header(zlib.decompressobj().decompress(head, _HEAD))
        except zlib.error:
            return False

    def identity(self) -> str:
        return repr(replace(self, verify=True))  # whether sums are checked changes no sample

    @classmethod
    def is_plain(cls, head: bytes) -> bool:
        return _is_header(head)  # a length may look like the magic number of a compressed file

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        head = data[:_HEAD].tobytes()
        if _is_header(head):
            return data
        return unzlib(data, url, limit) if is_zlib(head) else unpack(data, url, limit)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> RecordIndex:
        return RecordIndex(joined(_walk(data, url, ready), len(data), len(data)))

    def read(self, source: Bytes, index: RecordIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        begin, end = index.offsets.item(i), index.offsets.item(i + 1)
        payload = source[begin + _HEAD : end - _TAIL]
        if self.verify and crc32c(payload) != unmasked(_sum_at(source.data, end - _TAIL)[0]):
            raise FormatError(f"the payload of record {i} has a wrong CRC-32C", url=url, offset=begin + _HEAD)
        if not self.example:
            return Sample({_RECORD: payload} if fields is None or _RECORD in fields else ())
        try:
            return Sample(read_example(payload, fields))
        except WireError as e:
            what = f"record {i} is no tf.train.Example: {e.what}"
            raise FormatError(what, url=url, offset=begin + _HEAD + e.offset, hint=e.hint) from e


def _is_header(head: bytes) -> bool:
    return len(head) >= _HEAD and crc32c(head[:8]) == unmasked(_sum_at(head, 8)[0])


def _walk(data: Bytes, url: str, ready: Ready) -> Iterator[npt.NDArray[Any]]:
    """Runs of the offsets of all records, every length checked against its sum. Raises ``FormatError``.

    Headers are walked one by one, then checked many at once: no offset is given out before its header held. Records of
    one length, as token data sets have them, are not walked: where headers equal to the last one lie at equal distances
    there are records.
    """
    size = len(data)
    view = data.data
    dtype = offset_dtype(size)
    length_at = _length_at
    words = np.ndarray((max(size - _TAIL + 1, 0),), "<u4", data, 0, (1,))  # at each byte, whatever its alignment
    at = there = number = last = 0
    dense = False
    while at < size:
        if size - at < _HEAD:
            raise FormatError(f"the file is cut off in the header of record {number}", url=url, offset=at)
        if at + _HEAD > there:
            there = min(at + _AHEAD, size)
            ready(at, there)
        if number:
            alike = _alike(data, last, at, there)
            if len(alike):
                yield alike.astype(dtype)
                number += len(alike)
                last, at = int(alike[-1]), int(alike[-1]) + at - last
                continue
        begins: list[int] = []
        found = begins.append
        while at + _HEAD <= there and len(begins) < _BATCH:
            end = min(at + _BLOCK, there) - _HEAD
            if dense:
                np.add.reduce(data[at:end:_LINE])
            while at <= end:
                found(at)
                at += length_at(view, at)[0] + _FRAME
        last = begins[-1]
        dense = last - begins[0] < _SPARSE * len(begins)
        offsets = np.array(begins, np.int64)
        lengths = np.append(np.diff(offsets) - _FRAME, 0).astype(np.uint64)
        lengths[-1] = at - last - _FRAME
        wrong = np.flatnonzero(masked_lengths(lengths) != words[offsets + 8])
        if len(wrong):
            which = int(wrong[0])
            raise FormatError(
                f"the length of record {number + which} has a wrong CRC-32C", url=url, offset=begins[which]
            )
        number += len(begins)
        if at > size:
            raise FormatError(
                f"record {number - 1} should end at byte {at}, the file has {size}: cut off", url=url, offset=last
            )
        yield offsets.astype(dtype)


def _alike(data: Bytes, last: int, at: int, end: int) -> npt.NDArray[np.int64]:
    """The offsets of records from ``at`` on with the same header as the record before, at ``last``, as far as they
    follow each other and end before ``end``."""
    step = at - last
    most = _FIRST_RUN
    (length,), (total,) = _length_at(data.data, last), _sum_at(data.data, last + 8)
    runs = 0
    while (count := min((end - at) // step - runs, most)) > 0:
        start = at + runs * step
        lengths = np.ndarray((count,), "<u8", data, start, (step,))
        sums = np.ndarray((count,), "<u4", data, start + 8, (step,))
        other = np.flatnonzero((lengths != length) | (sums != total))
        runs += int(other[0]) if len(other) else count
        if len(other):
            break
        most *= 2
    return at + step * np.arange(runs)
