"""One header block of a tar archive: whether it is one, and the numbers in it.

See :mod:`.tar` for the layouts.
"""

from __future__ import annotations

import struct
import zlib

from cachefs.errors import FormatError

BLOCK = 512
_ADLER = 65521
_SPACES = 8 * 0x20
_SUM_END = b"\0 "
_SIZE_ENDS = b"\0 "
HEADER = struct.Struct("100s24x12s12x8sc100x6s82xB166x")
"""name, size, checksum, type flag, magic, first byte of the prefix"""
_PREFIX = slice(345, 500)


def is_tar(head: memoryview) -> bool:
    """Whether the first block is a tar header with a right checksum."""
    if len(head) < BLOCK:
        return False
    _, size, checksum, _, _, _ = HEADER.unpack_from(head, 0)
    try:
        _number(size)
        return checksum.strip(b" \0") != b"" and _checksum_holds(head[:BLOCK], checksum)
    except ValueError:
        return False


def is_blank(head: memoryview) -> bool:
    """Whether these bytes can be the start of an empty archive: nothing but zeros, at least one block of them."""
    return len(head) >= BLOCK and not any(head)


def plain_size(raw: bytes, checksum: bytes, adler: int) -> int:
    """The size in a header as all common writers fill it in, if its checksum holds; -1 for any other."""
    digits, total = raw[:11], checksum[:6]
    if not (digits.isdigit() and raw[11] in _SIZE_ENDS and total.isdigit() and checksum[6:] == _SUM_END):
        return -1
    try:
        declared = int(total, 8) + (zlib.adler32(checksum) & 0xFFFF) - _SPACES
        return int(digits, 8) if adler & 0xFFFF == declared else -1
    except ValueError:
        return -1


def checked_size(block: memoryview, raw_size: bytes, checksum: bytes, url: str, offset: int) -> int:
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


def joined(header: memoryview, name: bytes) -> bytes:
    """A name that goes on from the header's prefix."""
    return bytes(header[_PREFIX]).split(b"\0", 1)[0] + b"/" + name
