"""Numbers of variable length, seven bits a byte, as protobuf and Snappy have them."""

from __future__ import annotations

LONGEST = 10
"""Bytes of the longest one, which has 64 bits."""


class WireError(ValueError):
    """What is wrong, at which byte of the message."""

    def __init__(self, what: str, offset: int, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.offset = offset
        self.hint = hint


def varint(raw: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number that starts at ``at``, and the byte behind it."""
    value = 0
    for place in range(min(LONGEST, end - at)):
        byte = raw[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + place + 1
    raise WireError("a number that does not end", at)
