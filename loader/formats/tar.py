"""The headers of a tar archive, walked without touching a payload.

Layouts: ustar and pax (IEEE Std 1003.1, "pax Interchange Format"), the GNU extensions for long names and large sizes
(GNU tar manual, "Basic Tar Format"), and the older v7 header. Sizes follow Python's ``tarfile``: links, directories
and devices have no payload whatever their size field says. Sparse members are refused, since their bytes do not lie in
the archive as they are.

A member that runs past the end of the buffer, half a header and a wrong checksum are errors that name the offset;
Python's ``tarfile`` ends silently on most of them, which loses samples without a word.

An archive may be walked while it is still arriving: ``ready`` is asked for each piece before it is looked at, which are
the headers and what lies in extended ones, and nothing else.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachefs.errors import FormatError

from .abc import Ready, all_there

BLOCK = 512
_RECORD = 20 * BLOCK
_ADLER = 65521
_SPACES = 8 * 0x20
_USTAR = b"ustar\0"
_SUM_END = b"\0 "
_SIZE_ENDS = b"\0 "
_ZERO = bytes(BLOCK)
_HEADER = struct.Struct("100s24x12s12x8sc100x6s82xB166x")
"""name, size, checksum, type flag, magic, first byte of the prefix"""
_PREFIX = slice(345, 500)
_REGULAR = b"0\x007"
_NO_PAYLOAD = b"123456"
_MOST_EXTENDED = 1 << 20
_MOST_NAME = 1 << 16
_SPARSE = "GNU.sparse"


@dataclass
class TarNotes:
    """What a walk met apart from regular files: filled in while it runs."""

    others: int = 0
    """Links, directories, devices and entries of unknown kind."""
    messages: list[str] = field(default_factory=list)


def is_tar(head: memoryview) -> bool:
    """Whether the first block is a tar header with a right checksum."""
    if len(head) < BLOCK:
        return False
    _, size, checksum, _, _, _ = _HEADER.unpack_from(head, 0)
    try:
        _number(size)
        return checksum.strip(b" \0") != b"" and _checksum_holds(head[:BLOCK], checksum)
    except ValueError:
        return False


def is_blank(head: memoryview) -> bool:
    """Whether these bytes can be the start of an empty archive: nothing but zeros, at least one block of them."""
    return len(head) >= BLOCK and not any(head)


def walk(view: memoryview, url: str, notes: TarNotes, ready: Ready = all_there) -> Iterator[tuple[str, int, int, int]]:
    """``(name, header offset, payload offset, size)`` of each regular file, in archive order.

    Raises ``FormatError`` where the archive is damaged; a missing end marker alone is only noted.
    """
    end = len(view)
    if end == 0:
        raise FormatError(
            "an empty file is no tar archive", url=url, offset=0, hint="even an empty one has an end marker"
        )
    filling = ready is not all_there
    read, adler = _HEADER.unpack_from, zlib.adler32
    offset = 0
    defaults: dict[str, str] = {}
    extra: dict[str, str] = {}
    pending = -1  # offset of an extended header that still waits for its member
    while True:
        payload = offset + BLOCK
        if filling and offset < end:
            ready(offset, min(payload, end))
        if payload > end:
            _check_end(view, offset, pending, url)
            notes.messages.append("the tar has no end marker: it may have lost members or whole samples at its end")
            return
        name, raw_size, checksum, kind, magic, prefixed = read(view, offset)
        if prefixed and magic == _USTAR:  # GNU's own header keeps time stamps there
            name = _joined(view[offset:payload], name)
        if kind == b"0" and pending < 0 and not defaults:
            # what nearly all headers are, looked at the short way; whatever is odd about one is said below
            size = _plain_size(raw_size, checksum, adler(view[offset:payload]))
            if 0 <= size <= end - payload:
                yield _text(name.split(b"\0", 1)[0]), offset, payload, size
                offset = payload + _padded(size)
                continue
        if not name[0] and view[offset:payload] == _ZERO:
            _check_end(view, end, pending, url)
            behind = min(offset + _RECORD + BLOCK, end)
            ready(offset, behind)
            if not _blank(view[offset:behind]):
                notes.messages.append(f"data behind the tar's end marker at byte {offset} is not read (a joined tar?)")
            return
        size = _checked_size(view[offset:payload], raw_size, checksum, url, offset)
        if kind in b"xgXLK":
            if size > _MOST_EXTENDED:
                raise FormatError(
                    f"an extended header of {size} bytes", url=url, offset=offset, hint="1 MiB is the most"
                )
            if size > end - payload:
                raise FormatError("the tar is cut off within an extended header", url=url, offset=offset)
            ready(payload, payload + size)
            body = bytes(view[payload : payload + size])
            if kind == b"L":
                extra["path"] = _text(body.split(b"\0", 1)[0])
            elif kind != b"K":
                (defaults if kind == b"g" else extra).update(_pax_records(body, url, payload))
            if kind != b"g":
                pending = offset
            offset = payload + _padded(size)
            continue
        path = _text(name.split(b"\0", 1)[0])
        if extra or defaults:
            fields = defaults | extra
            path = fields.get("path") or path
            if len(path) > _MOST_NAME:
                raise FormatError(
                    f"a name of {len(path)} characters", url=url, offset=offset, hint="64 Ki are the most"
                )
            size = _pax_size(fields, size, path, url, offset)
            sparse = _SPARSE in fields
            extra = {}
        else:
            sparse = False
        pending = -1
        if sparse or kind == b"S":
            raise FormatError(f"member {path!r} is sparse, which cannot be read in place", url=url, offset=offset)
        if kind in _NO_PAYLOAD or (kind == b"\0" and path.endswith("/")):
            notes.others += 1
            offset = payload
            continue
        if size > end - payload:
            raise FormatError(
                f"the tar is cut off: member {path!r} needs {size} bytes, {max(end - payload, 0)} are there",
                url=url,
                offset=offset,
            )
        if kind in _REGULAR:
            yield path, offset, payload, size
        else:
            notes.others += 1
        offset = payload + _padded(size)


def _plain_size(raw: bytes, checksum: bytes, adler: int) -> int:
    """The size in a header as all common writers fill it in, if its checksum holds; -1 for any other."""
    digits, total = raw[:11], checksum[:6]
    if not (digits.isdigit() and raw[11] in _SIZE_ENDS and total.isdigit() and checksum[6:] == _SUM_END):
        return -1
    try:
        declared = int(total, 8) + (zlib.adler32(checksum) & 0xFFFF) - _SPACES
        return int(digits, 8) if adler & 0xFFFF == declared else -1
    except ValueError:
        return -1


def _check_end(view: memoryview, offset: int, pending: int, url: str) -> None:
    """Whether the archive may end here, with what is left of it behind ``offset``. Raises ``FormatError``."""
    if pending >= 0:
        raise FormatError("the tar ends behind an extended header", url=url, offset=pending)
    if not _blank(view[offset:]):
        raise FormatError("the tar is cut off within a header", url=url, offset=offset)


def _checked_size(block: memoryview, raw_size: bytes, checksum: bytes, url: str, offset: int) -> int:
    """The size that a header declares, once its checksum holds."""
    try:
        sound = _checksum_holds(block, checksum)
    except ValueError:
        sound = False
    if not sound:
        raise FormatError("no tar header here (wrong checksum)", url=url, offset=offset)
    try:
        return _number(raw_size)
    except ValueError:
        raise FormatError("the size in the tar header is not a number", url=url, offset=offset) from None


def _blank(view: memoryview) -> bool:
    return not bytes(view).strip(b"\0")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _checksum_holds(block: memoryview, stored: bytes) -> bool:
    """Whether the header's bytes, its checksum field read as spaces, add up to the checksum. ValueError: no number.

    The lower half of Adler-32 is that sum plus one, modulo 65521, at C speed. Some old writers summed signed bytes.
    """
    declared = _number(stored)
    if (zlib.adler32(block) & 0xFFFF) == (declared + sum(stored) - _SPACES + 1) % _ADLER:
        return True
    return sum(block.cast("b")) == declared + sum(memoryview(stored).cast("b")) - _SPACES


def _number(raw: bytes) -> int:
    """A header's number: octal digits, or base 256 with the top bit set. ValueError for anything else."""
    digits = raw.strip(b" \0")
    if digits.isdigit():
        return int(digits, 8)
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    digits = raw.split(b"\0", 1)[0].strip()
    if not digits:
        return 0
    if not digits.isdigit():
        raise ValueError(raw)
    return int(digits, 8)


def _joined(header: memoryview, name: bytes) -> bytes:
    """A name that goes on from the header's prefix."""
    return bytes(header[_PREFIX]).split(b"\0", 1)[0] + b"/" + name


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _pax_size(fields: dict[str, str], size: int, path: str, url: str, offset: int) -> int:
    text = fields.get("size")
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise FormatError(f"the size of member {path!r} is not a number", url=url, offset=offset)
    return int(text)


def _pax_records(body: bytes, url: str, offset: int) -> dict[str, str]:
    """What matters of the records ``"<length> <key>=<value>\\n"`` of one extended header.

    All else is dropped at once, so a header of many records costs nothing for the members behind it.
    """
    records: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at]:
        space = body.find(b" ", at, at + 20)
        digits = body[at:space] if space > 0 else b""
        stop = at + int(digits) if digits.isdigit() else 0
        equals = body.find(b"=", space + 1, stop) if stop else -1
        if equals < 0 or stop > len(body) or body[stop - 1] != 0x0A:
            raise FormatError("a record of the pax header is malformed", url=url, offset=offset + at)
        key = body[space + 1 : equals]
        if key in (b"path", b"size"):
            records[_text(key)] = _text(body[equals + 1 : stop - 1])
        elif key.startswith(b"GNU.sparse"):
            records[_SPARSE] = ""
        at = stop
    return records
