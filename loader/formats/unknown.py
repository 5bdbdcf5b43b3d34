"""What to do with a shard that is in no known format, told from its first bytes."""

from __future__ import annotations

import json

from cachefs.errors import UnknownFormat

from .magic import image_kind

TOKENS_HINT = 'headerless token files need format=formats.Tokens(length=2048, dtype="uint16")'
FILES_HINT = 'format="files" makes every file a sample'
_PACKED = {"gz": "a gzip", "zstd": "a Zstandard", "bz2": "a bzip2", "xz": "an xz"}
_OTHERS = {
    b"\xde\xc0\xef\xbe": "LMDB's lock file; open the data.mdb beside it",
    b"\x89HDF\r\n": "HDF5, which is not read",
    b"SQLite format 3": "SQLite, which is not read",
    b"PK\x03\x04": "a zip archive that is no npz, which is not read",
    b"FEA1": "Feather 1, which is not read; pyarrow's feather.write_feather writes Feather 2",
}
_LINES = "convert it to JSON Lines (one object a line) or Parquet"


def unknown(head: bytes, codec: str | None, url: str) -> UnknownFormat:
    """The error for a shard that begins with ``head``, once decompressed with ``codec``."""
    looks, hint = _looks_like(head)
    if codec is None:
        what = f"looks like {looks}" if looks else "no known format fits the bytes"
        return UnknownFormat(what, url=url, hint=hint if looks else TOKENS_HINT)
    what = f"{_PACKED[codec]} file that holds no known format"
    return UnknownFormat(f"{what}; it looks like {looks}" if looks else what, url=url, hint=hint)


def _looks_like(head: bytes) -> tuple[str, str | None]:
    """In words, what it looks like (``""``: like nothing known), and the way out."""
    other = next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None)
    if other is not None:
        return other, None
    image = image_kind(head)
    if image:
        return f"an image ({image})", FILES_HINT
    text = _text(head)
    if text is None:
        return "", None
    if _is_json(text):
        return "one JSON document, which is not read", _LINES
    if _is_table(text):
        return "CSV or another table of text, which is not read", _LINES
    return "text, which is not read", f"{_LINES}; {FILES_HINT}"


def _text(head: bytes) -> str | None:
    """``head`` as text, whose last character may be cut; ``None`` if it is none."""
    for drop in range(4):
        try:
            text = head[: len(head) - drop].decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        return text if text.strip() and all(c.isprintable() or c in "\r\n\t" for c in text) else None
    return None


def _is_json(text: str) -> bool:
    """Whether a JSON array, or an object over several lines, begins so. Of a long one only the beginning is here."""
    text = text.strip()
    if text[0] not in "[{":
        return False
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as e:
        return e.pos >= len(text) - 1 or text[1:].lstrip()[:1] in ('"', "{", "[", "]", "}")
    except RecursionError:
        return True
    return True


def _is_table(text: str) -> bool:
    """Whether the first lines have the same number of commas, semicolons or tabs, and at least one."""
    lines = [line for line in text.splitlines()[:2] if line.strip()]
    return any(lines[0].count(mark) and lines[0].count(mark) == lines[-1].count(mark) for mark in ",;\t")
