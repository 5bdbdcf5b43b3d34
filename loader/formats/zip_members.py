"""The members of a zip archive that is mapped: where each lies, and its bytes once they are checked.

It follows PKWARE's APPNOTE as far as ``zipfile`` writes it: one disk, stored or deflated members, Zip64. On purpose
stricter than ``zipfile``: the central directory must end where its end record begins, both headers of a member must
agree, members may not overlap, and the whole output is bounded before anything is decompressed.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import NamedTuple

import numpy as np

from cachefs.errors import FormatError, UnknownFormat

from .abc import Bytes
from .packed import MOST

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
_END, _END64, _LOCATOR64, _ENTRY = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02"
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _UTF8 = 0x1, 0x800
_LOCAL_SIZE, _ENTRY_SIZE, _END_SIZE, _LOCATOR_SIZE, _END64_SIZE = 30, 46, 22, 20, 56
_ZIP64 = 0x0001
_ENTRY_FIELDS = struct.Struct("<8xHH4xLLLHHHH6xL")
_RATIO = 1032
"""No deflate stream is longer than this many times its input."""
_STEP = 1 << 20


class Member(NamedTuple):
    """``at``, ``packed``: where its stored bytes lie; ``size``: of its content; ``method``: how it is packed."""

    name: str
    at: int
    packed: int
    size: int
    method: int
    crc: int


def members(data: Bytes, url: str) -> list[Member]:
    """All members but folders, in the directory's order. Raises ``FormatError`` for an archive that is damaged."""
    start, count, end = _directory(data, url)
    if count * _ENTRY_SIZE > end - start:
        raise FormatError(f"its directory declares {count} members: damaged", url=url, offset=start)
    found: list[Member] = []
    at = start
    for _ in range(count):
        member, local, at = _entry(data, at, end, url)
        if not member.name.endswith("/"):
            found.append(_placed(data, member, local, start, url))
    if at != end:
        raise FormatError("its directory is longer than its members take: damaged", url=url, offset=at)
    by_place = sorted(found, key=lambda member: member.at)
    for one, other in itertools.pairwise(by_place):
        if one.at + one.packed > other.at:
            raise FormatError(f"members {one.name!r} and {other.name!r} overlap", url=url, offset=other.at)
    if sum(member.size for member in found if member.method != STORED) > MOST:
        raise FormatError(f"decompresses to more than {MOST} bytes", url=url, hint="write smaller shards")
    return found


def head_of(data: Bytes, member: Member, most: int, url: str) -> Bytes:
    """The first ``most`` bytes of a member's content (or all), not checked against its CRC."""
    raw = data[member.at : member.at + member.packed]
    if member.method == STORED:
        return raw[:most]
    try:
        return np.frombuffer(bytearray(zlib.decompressobj(-15).decompress(raw.data, most)), np.uint8)
    except zlib.error as e:
        raise FormatError(f"member {member.name!r} is damaged: {e}", url=url, offset=member.at) from e


def content_of(data: Bytes, member: Member, url: str) -> Bytes:
    """A member's whole content, checked against its CRC: a view of a stored one, private memory of a deflated one."""
    raw = data[member.at : member.at + member.packed]
    content = raw if member.method == STORED else _inflate(raw, member, url)
    if zlib.crc32(content.data) != member.crc:
        raise FormatError(f"member {member.name!r} does not match its CRC", url=url, offset=member.at)
    return content


def _inflate(raw: Bytes, member: Member, url: str) -> Bytes:
    out = np.empty(member.size, np.uint8)
    stream = zlib.decompressobj(-15)
    filled = 0
    rest: bytes | memoryview = raw.data
    try:
        while not stream.eof and filled <= member.size:
            part = stream.decompress(rest[:_STEP], _STEP)
            rest = _behind(rest, stream.unconsumed_tail)
            if not (part or rest or stream.eof):
                break
            kept = np.frombuffer(part, np.uint8)[: member.size - filled]
            out[filled : filled + len(kept)] = kept
            filled += len(part)
    except zlib.error as e:
        raise FormatError(f"member {member.name!r} is damaged: {e}", url=url, offset=member.at) from e
    if not stream.eof or filled != member.size or stream.unused_data or len(rest):
        raise FormatError(f"member {member.name!r} is not of the size it declares", url=url, offset=member.at)
    return out


def _behind(rest: bytes | memoryview, tail: bytes) -> bytes | memoryview:
    """What is left after one step, which ended with ``tail`` not consumed."""
    return rest[min(_STEP, len(rest)) - len(tail) :]


def _directory(data: Bytes, url: str) -> tuple[int, int, int]:
    """Where the central directory begins, how many members it has, and where it ends."""
    size = len(data)
    base = max(size - _END_SIZE - _FULL16, 0)
    tail = data[base:].tobytes()
    at = tail.rfind(_END)
    while at >= 0 and not (
        at + _END_SIZE <= len(tail) and at + _END_SIZE + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail)
    ):
        at = tail.rfind(_END, 0, at + 3)
    if at < 0:
        raise FormatError("the directory at a zip archive's end is missing: cut off", url=url, offset=size)
    end = base + at
    disks, first, here, count, length, start = struct.unpack("<4H2L", tail[at + 4 : at + 20])
    locator = data[max(end - _LOCATOR_SIZE, 0) : end].tobytes()
    if _FULL16 in (here, count) or _FULL32 in (length, start):
        where = struct.unpack("<Q", locator[8:16])[0] if len(locator) == _LOCATOR_SIZE else size
        record = data[min(where, size) : min(where, size) + _END64_SIZE].tobytes()
        if len(record) < _END64_SIZE or record[:4] != _END64 or locator[:4] != _LOCATOR64:
            raise FormatError("the Zip64 end of its directory is damaged", url=url, offset=end)
        disks, first, here, count, length, start = struct.unpack("<2L4Q", record[16:56])
        end = where
    if disks or first or here != count:
        raise UnknownFormat("a zip archive of several disks, which is not read", url=url)
    if start + length != end:
        raise FormatError(
            "its directory is not where it should be: damaged, or other data in front", url=url, offset=end
        )
    return start, count, end


def _entry(data: Bytes, at: int, end: int, url: str) -> tuple[Member, int, int]:
    """One entry of the directory: the member (not placed yet), where its own header lies, and where the entry ends."""
    fault = FormatError("an entry of its directory is damaged", url=url, offset=at)
    head = data[at : min(at + _ENTRY_SIZE, end)].tobytes()
    if len(head) < _ENTRY_SIZE or head[:4] != _ENTRY:
        raise fault
    flags, method, crc, packed, size, name_size, extra_size, comment_size, disk, local = _ENTRY_FIELDS.unpack(head)
    done = at + _ENTRY_SIZE + name_size + extra_size + comment_size
    if done > end or disk:
        raise fault
    raw_name = data[at + _ENTRY_SIZE : at + _ENTRY_SIZE + name_size].tobytes()
    extra = data[at + _ENTRY_SIZE + name_size : at + _ENTRY_SIZE + name_size + extra_size].tobytes()
    wide = iter(_wide_numbers(extra))
    try:
        size, packed, local = (next(wide) if number == _FULL32 else number for number in (size, packed, local))
        name = raw_name.decode("utf-8" if flags & _UTF8 else "cp437")
    except (RuntimeError, StopIteration, UnicodeDecodeError) as e:
        raise fault from e
    if flags & _ENCRYPTED:
        raise UnknownFormat(f"member {name!r} is encrypted", url=url)
    return Member(name, 0, packed, size, method, crc), local, done


def _wide_numbers(extra: bytes) -> list[int]:
    """The 64-bit numbers of the Zip64 field among the extra fields, if there is one."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        body = extra[at + 4 : at + 4 + length]
        if kind == _ZIP64:
            return [int.from_bytes(body[k : k + 8], "little") for k in range(0, len(body) - 7, 8)]
        at += 4 + length
    return []


def _placed(data: Bytes, member: Member, local: int, limit: int, url: str) -> Member:
    """The member with the place of its bytes, from its own header; ``limit``: where the directory begins."""
    name = member.name
    fault = FormatError(f"the header of member {name!r} is damaged", url=url, offset=min(local, limit))
    head = data[min(local, limit) : min(local + _LOCAL_SIZE, limit)].tobytes()
    if len(head) < _LOCAL_SIZE or head[:4] != MAGIC:
        raise fault
    flags, method, name_size, extra_size = struct.unpack("<HH16xHH", head[6:])
    at = local + _LOCAL_SIZE + name_size + extra_size
    own = data[local + _LOCAL_SIZE : local + _LOCAL_SIZE + name_size].tobytes()
    if (
        at + member.packed > limit
        or method != member.method
        or own != name.encode("utf-8" if flags & _UTF8 else "cp437", "replace")
    ):
        raise fault
    if method not in (STORED, DEFLATED):
        raise UnknownFormat(f"member {name!r} is packed by method {method}; stored and deflate are read", url=url)
    right = member.size == member.packed if method == STORED else member.size <= _RATIO * member.packed + _RATIO
    if not right:
        raise FormatError(f"member {name!r} declares a size that cannot be: {member.size}", url=url, offset=local)
    return member._replace(at=at)
