"""Magic numbers of compressed files, and of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ZSTD = b"\x28\xb5\x2f\xfd"
_MAGIC = {b"\x1f\x8b\x08": "gz", ZSTD: "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
_IMAGES = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\x00": "tiff",
    b"MM\x00*": "tiff",
}
_SKIPPABLE = 0x184D2A50
_SKIP_HEAD = 8
_MOST_SKIPPED = 16


def codec_of(data: npt.NDArray[Any]) -> str | None:
    """Which codec of :data:`loader.formats.packed.CODECS` the first bytes are the magic number of; ``None``: of none.

    Frames that Zstandard's tools put first and its decoders skip (pzstd) count as its own if one of its frames follows.
    """
    head = data[:6].tobytes()
    found = next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)
    return "zstd" if found is None and _skips_to_zstd(data) else found


def image_kind(head: bytes) -> str:
    """``"jpeg"``, ``"png"``, ``"webp"`` ... for bytes that begin as such an image does, else ``""``."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((kind for magic, kind in _IMAGES.items() if head.startswith(magic)), "")


def is_skippable(head: bytes | memoryview) -> bool:
    """Whether a frame that Zstandard decoders skip begins so (RFC 8878, 3.1.2)."""
    return int.from_bytes(head[:4], "little") & 0xFFFFFFF0 == _SKIPPABLE


def is_zlib(head: bytes) -> bool:
    """Whether these can be the first bytes of a zlib stream (RFC 1950): two bytes, which other data may have too."""
    return len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def _skips_to_zstd(data: npt.NDArray[np.uint8]) -> bool:
    at = 0
    for _ in range(_MOST_SKIPPED):
        head = data[at : at + _SKIP_HEAD].tobytes()
        if len(head) < _SKIP_HEAD or not is_skippable(head):
            break
        at += _SKIP_HEAD + int.from_bytes(head[4:], "little")
    return at > 0 and data[at : at + 4].tobytes() == ZSTD
