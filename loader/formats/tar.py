"""The headers of a tar archive, walked without touching a payload.

Layouts: ustar and pax (IEEE Std 1003.1, "pax Interchange Format"), the GNU extensions for long names and large sizes
(GNU tar manual, "Basic Tar Format"), and the older v7 header. Sizes follow Python's ``tarfile``: links, directories
and devices have no payload whatever their size field says. Sparse members are refused, since their bytes do not lie in
the archive as they are.

A member that runs past the end of the buffer, half a header and a wrong checksum are errors that name the offset;
Python's ``tarfile`` ends silently on most of them, which loses samples without a word. A block of zeros where a header
should be ends the archive only if all behind it is looked at too (:mod:`.tar_end`): members that follow are an error,
unless they are an archive of their own that somebody joined to this one, which is noted.

An archive may be walked while it is still arriving: ``ready`` is asked for each piece before it is looked at, which are
the headers and what lies in extended ones, and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachefs.errors import FormatError

from .abc import Ready, all_there
from .tar_end import after_end
from .tar_header import BLOCK, HEADER, checked_size, joined, plain_size

Ahead = Callable[[int], int]

_USTAR = b"ustar\0"
_ZERO = bytes(BLOCK)
_REGULAR = b"0\x007"
_NO_PAYLOAD = b"123456"
_MOST_EXTENDED = 1 << 20
_MOST_NAME = 4096
"""Characters; no file system has longer paths."""
_SHOWN = 200
_SPARSE = "GNU.sparse"


@dataclass
class TarNotes:
    """What is odd about an archive: filled in while it is walked."""

    messages: list[str] = field(default_factory=list)


def walk(
    view: memoryview, url: str, notes: TarNotes, ready: Ready = all_there, ahead: Ahead = lambda offset: offset
) -> Iterator[tuple[str, int, int, int]]:
    """``(name, header offset, payload offset, size)`` of each regular file, in archive order.

    ``ahead`` may take members itself: told where the header behind one should be, it returns where to go on.

    Raises ``FormatError`` where the archive is damaged; a missing end marker alone is only noted.
    """
    end = len(view)
    if end == 0:
        raise FormatError(
            "an empty file is no tar archive", url=url, offset=0, hint="even an empty one has an end marker"
        )
    filling = ready is not all_there
    read, adler = HEADER.unpack_from, zlib.adler32
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
            name = joined(view[offset:payload], name)
        if kind == b"0" and pending < 0 and not defaults:
            # what nearly all headers are, looked at the short way; whatever is odd about one is said below
            size = plain_size(raw_size, checksum, adler(view[offset:payload]))
            if 0 <= size <= end - payload:
                yield _text(name.split(b"\0", 1)[0]), offset, payload, size
                offset = ahead(payload + _padded(size))
                continue
        if not name[0] and view[offset:payload] == _ZERO:
            _check_end(view, end, pending, url)
            ready(offset, end)
            note = after_end(view, offset, url)
            if note is not None:
                notes.messages.append(note)
            return
        size = checked_size(view[offset:payload], raw_size, checksum, url, offset)
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
            elif kind == b"g":
                defaults |= _defaults(body, url, payload)
            elif kind != b"K":
                extra |= _pax_records(body, url, payload)
            if kind != b"g":
                pending = offset
            offset = payload + _padded(size)
            continue
        path = _text(name.split(b"\0", 1)[0])
        if extra or defaults:
            fields = defaults | extra
            path = fields.get("path") or path
            if len(path) > _MOST_NAME:
                hint = f"{_MOST_NAME} are the most"
                raise FormatError(f"a name of {len(path)} characters", url=url, offset=offset, hint=hint)
            size = _pax_size(fields, size, path, url, offset)
            sparse = _SPARSE in fields
            extra = {}
        else:
            sparse = False
        pending = -1
        if sparse or kind == b"S":
            raise FormatError(f"member {shown(path)} is sparse, which cannot be read in place", url=url, offset=offset)
        if kind in _NO_PAYLOAD or (kind == b"\0" and path.endswith("/")):
            offset = payload
            continue
        if size > end - payload:
            raise FormatError(
                f"the tar is cut off: member {shown(path)} needs {size} bytes, {max(end - payload, 0)} are there",
                url=url,
                offset=offset,
            )
        if kind in _REGULAR:
            yield path, offset, payload, size
        offset = payload + _padded(size)
        if not defaults:
            offset = ahead(offset)


def shown(path: str) -> str:
    """A member's name as messages say it: quoted, and not in full where it is long."""
    return repr(path if len(path) <= _SHOWN else f"{path[: _SHOWN // 2]}...{path[-_SHOWN // 2 :]}")


def _defaults(body: bytes, url: str, offset: int) -> dict[str, str]:
    """What a global header says of all members behind it, which cannot be their name."""
    records = _pax_records(body, url, offset)
    if "path" in records:
        raise FormatError("a global pax header gives all members one name", url=url, offset=offset)
    return records


def _check_end(view: memoryview, offset: int, pending: int, url: str) -> None:
    """Whether the archive may end here, with what is left of it behind ``offset``. Raises ``FormatError``."""
    if pending >= 0:
        raise FormatError("the tar ends behind an extended header", url=url, offset=pending)
    if not _blank(view[offset:]):
        raise FormatError("the tar is cut off within a header", url=url, offset=offset)


def _blank(view: memoryview) -> bool:
    return not bytes(view).strip(b"\0")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _pax_size(fields: dict[str, str], size: int, path: str, url: str, offset: int) -> int:
    text = fields.get("size")
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise FormatError(f"the size of member {shown(path)} is not a number", url=url, offset=offset)
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
