"""What bytes look like, told from how they begin. A guess for people and for names; nothing is read by it."""

from __future__ import annotations

# fmt: off
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"), (b"BM", "bmp"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"%PDF-", "pdf"), (b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd"), (b"\x93NUMPY", "npy"), (b"PK\x03\x04", "zip"), (b"fLaC", "flac"), (b"OggS", "ogg"),
    (b"ID3", "mp3"), (b"\xff\xfb", "mp3"), (b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\x1aE\xdf\xa3", "matroska"),
    (b"\x80\x02", "pickle"), (b"\x80\x04", "pickle"), (b"\x80\x05", "pickle"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
# fmt: on


def guess(raw: bytes | memoryview) -> str:
    """What bytes look like: ``jpeg``, ``text`` ...; ``""`` for no idea."""
    head = bytes(raw[:512])
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "riff")
    if head[4:8] == b"ftyp":
        return "mp4"
    if not head:
        return ""
    text = _text(head, cut=len(raw) > len(head))
    return "text" if text is not None and all(c.isprintable() or c in "\r\n\t" for c in text) else ""


def _text(head: bytes, *, cut: bool) -> str | None:
    for drop in range(4 if cut else 1):
        try:
            return head[: len(head) - drop].decode()
        except UnicodeDecodeError:
            continue
    return None
