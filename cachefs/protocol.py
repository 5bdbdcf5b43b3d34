"""What client and daemon say to each other over the control socket.

A frame is a 4-byte little-endian length and one msgpack map; the field ``t`` names the message. A client sends one
request at a time on a connection and reads its reply; :class:`Release` has none. Descriptors (data, bitmap) travel
with the bytes of :class:`Opened`. After :class:`Payload` follow ``size`` raw bytes outside any frame.

:class:`Hello` and its replies must stay readable by every version: fields may be added with defaults, never changed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from . import errors
from .config import Origin
from .errors import CacheError, ConfigError, NearflashError
from .shard import ObjectStat

VERSIONS = (1,)
"""Protocol versions that this code speaks, newest first."""
MAX_FRAME = 4 << 20
"""Bytes; a longer frame is garbage. Lists are sent in pages of :data:`PAGE_ITEMS`."""
PAGE_ITEMS = 1000

_LENGTH = struct.Struct("<I")


class Item(msgspec.Struct, frozen=True):
    """An object to bring in ahead of time."""

    url: str
    version: str | None = None
    size: int | None = None


class EntryInfo(msgspec.Struct, frozen=True):
    """One object in the cache. Sizes in bytes, ``last_use`` in seconds since the epoch."""

    url: str
    version: str
    size: int
    cached_bytes: int
    disk_bytes: int
    state: str
    leases: int
    last_use: float


# --- requests -------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """First on every connection. Connections with one ``session`` share leases, which end with the last of them."""

    versions: tuple[int, ...]
    session: str
    pid: int
    origin: Origin


class Open(msgspec.Struct, frozen=True, tag_field="t", tag="open"):
    url: str
    version: str | None = None
    size: int | None = None


class Wait(msgspec.Struct, frozen=True, tag_field="t", tag="wait"):
    """Answered once chunks ``[first, stop)`` are present, or after ``seconds``."""

    lease: int
    first: int
    stop: int
    seconds: float


class Fetch(msgspec.Struct, frozen=True, tag_field="t", tag="fetch"):
    """Bytes ``[start, end)`` of one version, past the cache; at most one chunk's worth."""

    url: str
    version: str
    size: int
    start: int
    end: int


class Release(msgspec.Struct, frozen=True, tag_field="t", tag="release"):
    """Give back leases; no reply, unknown ones are ignored. An empty list only tells that replies were read."""

    leases: list[int]


class Prefetch(msgspec.Struct, frozen=True, tag_field="t", tag="prefetch"):
    items: list[Item]


class List(msgspec.Struct, frozen=True, tag_field="t", tag="list"):
    url: str
    delimiter: bool = False
    cached: bool = False


class Stat(msgspec.Struct, frozen=True, tag_field="t", tag="stat"):
    url: str


class Entries(msgspec.Struct, frozen=True, tag_field="t", tag="entries"):
    pass


class Evict(msgspec.Struct, frozen=True, tag_field="t", tag="evict"):
    """Drop every version of these URLs (or of everything) that nobody holds a lease on."""

    urls: list[str]
    everything: bool = False


class Stats(msgspec.Struct, frozen=True, tag_field="t", tag="stats"):
    pass


class Stop(msgspec.Struct, frozen=True, tag_field="t", tag="stop"):
    pass


# --- replies --------------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag_field="t", tag="welcome"):
    version: int
    pid: int
    cache_dir: str


class Opened(msgspec.Struct, frozen=True, tag_field="t", tag="opened"):
    """``lease`` 0, no descriptors, and a ``reason`` of error class ``kind`` when the cache cannot take the object.

    The daemon takes the lease back if the connection ends before another request arrives on it: nobody may have read
    this reply. From then on the lease is the session's.
    """

    size: int
    version: str
    chunk_size: int
    lease: int = 0
    reason: str = ""
    kind: str = ""


class Waited(msgspec.Struct, frozen=True, tag_field="t", tag="waited"):
    """``known`` is false for a lease this daemon never gave: the client opens again."""

    done: bool
    present: int
    known: bool = True


class Payload(msgspec.Struct, frozen=True, tag_field="t", tag="payload"):
    size: int


class Done(msgspec.Struct, frozen=True, tag_field="t", tag="done"):
    pass


class StatPage(msgspec.Struct, frozen=True, tag_field="t", tag="stats_page"):
    items: list[ObjectStat]
    last: bool = True


class EntryPage(msgspec.Struct, frozen=True, tag_field="t", tag="entries_page"):
    items: list[EntryInfo]
    last: bool = True


class Evicted(msgspec.Struct, frozen=True, tag_field="t", tag="evicted"):
    """``busy`` counts entries that are leased or filling and stay."""

    entries: int
    bytes: int
    busy: int


class StatsReply(msgspec.Struct, frozen=True, tag_field="t", tag="stats_reply"):
    values: dict[str, float | int | str | None]


class Failed(msgspec.Struct, frozen=True, tag_field="t", tag="failed"):
    """An error of :mod:`cachefs.errors` by class name."""

    kind: str
    what: str
    url: str | None = None
    offset: int | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: NearflashError) -> Failed:
        return cls(type(error).__name__, error.what, error.url, error.offset, error.hint)

    def error(self) -> NearflashError:
        """The same error again; a class that this version does not know becomes its base."""
        found = getattr(errors, self.kind, None)
        kind = found if isinstance(found, type) and issubclass(found, NearflashError) else NearflashError
        return kind(self.what, url=self.url, offset=self.offset, hint=self.hint)


Request = Hello | Open | Wait | Fetch | Release | Prefetch | List | Stat | Entries | Evict | Stats | Stop
Reply = Welcome | Opened | Waited | Payload | Done | StatPage | EntryPage | Evicted | StatsReply | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

T = TypeVar("T")


def encode(message: Request | Reply) -> bytes:
    """One frame. Raises :class:`ConfigError` for what cannot be sent: too long, or text that is not unicode."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as e:
        raise ConfigError("a URL that is not valid unicode", url=ascii(e.object)) from e
    if len(body) > MAX_FRAME:
        raise ConfigError(f"a message of {len(body)} bytes; at most {MAX_FRAME} fit into one")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Raises :class:`CacheError` for garbage."""
    return _decode(_requests, body)


def decode_reply(body: bytes) -> Reply:
    """Raises :class:`CacheError` for garbage."""
    return _decode(_replies, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CacheError(f"a message that cannot be read: {e}") from e


class FrameBuffer:
    """Cuts a byte stream into frames; what is left over stays for the next bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def frames(self) -> Iterator[bytes]:
        """Complete frames' bodies so far. Raises :class:`CacheError` for a length beyond the limit."""
        while (body := self.next_frame()) is not None:
            yield body

    def next_frame(self) -> bytes | None:
        """The next complete frame's body, or ``None``."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._limit:
            raise CacheError(f"a frame of {length} bytes; at most {self._limit} are allowed")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body

    def take_raw(self, most: int) -> bytes:
        """Up to ``most`` bytes that are left over, outside any frame."""
        raw = bytes(self._bytes[:most])
        del self._bytes[:most]
        return raw
