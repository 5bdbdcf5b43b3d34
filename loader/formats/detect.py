"""Which format a shard is in, told from its first bytes and never from its name."""

from __future__ import annotations

from cachefs.errors import ConfigError, FormatError, NotFound

from .abc import Bytes, Format, Objects
from .magic import codec_of
from .packed_head import begins
from .registry import BY_NAME, ORDER
from .tar_header import BLOCK, is_blank
from .tokens import Tokens
from .unknown import TOKENS_HINT, unknown

HEAD = 4096
_ENOUGH = 1 << 20
"""Bytes that hold the first block of any compressed file."""


def resolve(format: object) -> Format | None:
    """The format that the user named; ``None`` where the bytes shall decide."""
    if format is None or isinstance(format, Format):
        return format
    if format == "tokens":
        raise ConfigError("format='tokens' does not say length and dtype", hint=TOKENS_HINT)
    if isinstance(format, type) and issubclass(format, Format):
        hint = TOKENS_HINT if format is Tokens else f"write formats.{format.__name__}()"
        raise ConfigError(f"format=formats.{format.__name__} is a class", hint=hint)
    if not isinstance(format, str) or format not in BY_NAME:
        hint = f"known: {', '.join(BY_NAME)}, and tokens, written formats.Tokens(length=...)"
        raise ConfigError(f"format={format!r} is not known", hint=hint)
    return BY_NAME[format]()


def detect(objects: Objects, url: str) -> Format | None:
    """The format of a shard. ``None``: nothing but zeros, as an empty tar is; other shards have to tell.

    Raises ``UnknownFormat`` that says what the bytes look like, or what to write for a headerless file; an empty file
    is a ``FormatError``.
    """
    try:
        data, ready = objects.map(url)
        ready(0, len(data))
    except NotFound:
        found = _beside(objects, url)
        if found is None:
            raise
        return found
    if len(data) == 0 or is_blank(data[:BLOCK].data):  # padding tokens look like that too, if an index says so
        return _beside(objects, url) or detect_bytes(data, url)
    known = detect_bytes(data, url, lost=False)
    if known is not None:
        return known
    found = _beside(objects, url)
    if found is None:
        raise unknown(peek(data), codec_of(data), url)
    return found


def _beside(objects: Objects, url: str) -> Format | None:
    return next((found for kind in ORDER if (found := kind.beside(objects, url)) is not None), None)


def detect_bytes(data: Bytes, url: str, *, lost: bool = True) -> Format | None:
    """As :func:`detect`, from one object's bytes alone. ``lost=False``: ``None`` also for what is not known."""
    if len(data) == 0:
        raise FormatError("an empty file holds no shard", url=url, offset=0)
    head = peek(data)
    if is_blank(memoryview(head)[:BLOCK]):
        return None
    for kind in ORDER:
        if kind.matches(head, data):
            return kind()
    if lost:
        raise unknown(peek(data), codec_of(data), url)
    return None


def peek(data: Bytes) -> bytes:
    """The first :data:`HEAD` bytes of what the shard decompresses to, or of itself; less where it is damaged."""
    head = data[:HEAD].tobytes()
    if codec_of(data) is None or any(kind.is_plain(head) for kind in ORDER):
        return head
    return begins(data[:_ENOUGH], HEAD)
