"""What lies behind the block of zeros that may be a tar's end marker.

The marker is two blocks of zeros, and writers fill the last record up with more of them. Where a disk or a copy lost
blocks there are zeros too, with members behind them, and readers that stop at the first zeros lose those without a
word. So all that follows is looked at; it is padding, as a rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .tar_header import BLOCK, is_tar

_MARKER = 2 * BLOCK
_RECORDS = (20 * BLOCK, *(BLOCK << k for k in range(15)))
"""Sizes of the records that writers fill up: by default 20 blocks, else powers of two."""
_AT_ONCE = 1 << 20
_SUM = slice(148, 156)
_IN_SUM = np.isin(np.arange(256), np.frombuffer(b"01234567 \0", np.uint8))

Bytes = npt.NDArray[np.uint8]


def after_end(view: memoryview, marker: int, url: str) -> str | None:
    """What is odd about an archive that ends with the zero block at ``marker``; ``None``: nothing.

    Raises ``FormatError`` where members follow that the zeros cannot have been the end of.
    """
    data = np.frombuffer(view, np.uint8)
    found = _first_not_zero(data, marker)
    if marker == 0 and (found >= 0 or not _may_end(0, len(data))):
        hint = "if it is meant to be none, name its format: format=..."
        raise FormatError("begins with zeros, and is no empty tar", url=url, offset=0, hint=hint)
    if found < 0:
        if len(data) - marker < _MARKER:
            return "the tar has half an end marker: it may have lost members or whole samples at its end"
        if len(data) - marker >= _RECORDS[0] + _MARKER and not _may_end(marker, len(data)):
            return f"more zeros end the tar than it needs, from byte {marker} on: it may have lost members there"
        return None
    if found < marker + _MARKER:
        raise FormatError("one block of zeros where a header should be", url=url, offset=marker)
    begin = found // BLOCK * BLOCK
    member = next(_headers(view, data, begin), -1)
    if member < 0:
        return f"data behind the tar's end marker at byte {marker} is not read"
    if member == begin and _may_end(marker, begin, len(data)):
        return f"the archive from byte {begin} on, behind the tar's end marker, is not read (a joined tar?)"
    raise FormatError(
        f"zeros where members should be: there are more of them from byte {member} on",
        url=url,
        offset=marker,
        hint="the file is damaged, or several tars were joined",
    )


def _may_end(marker: int, *ends: int) -> bool:
    """Whether an archive whose end marker begins at ``marker`` may have been filled up to the first of ``ends``, by
    records that divide all of them."""
    zeros = ends[0] - marker
    return any(zeros < record + _MARKER and not any(end % record for end in ends) for record in _RECORDS)


def _first_not_zero(data: Bytes, start: int) -> int:
    for at in range(start, len(data), _AT_ONCE):
        piece = data[at : at + _AT_ONCE]
        if piece.any():
            return at + int((piece != 0).argmax())
    return -1


def _headers(view: memoryview, data: Bytes, start: int) -> Iterator[int]:
    """The offsets of all blocks from ``start`` on that are headers with a right checksum."""
    for at in range(start, len(data) - BLOCK + 1, _AT_ONCE):
        end = min(at + _AT_ONCE, len(data)) // BLOCK * BLOCK
        blocks = data[at:end].reshape(-1, BLOCK)
        likely = _IN_SUM[blocks[:, _SUM]].all(axis=1) & blocks[:, 0].astype(np.bool_)
        for number in np.flatnonzero(likely).tolist():
            begin = at + number * BLOCK
            if is_tar(view[begin : begin + BLOCK]):
                yield begin
