"""What client and daemon say to each other over the control socket.

A frame is a 4-byte little-endian length and one msgpack map; the field ``t`` names the message. A client sends one
request at a time on a connection and reads its reply; :class:`Release` has none. Descriptors travel with the bytes of
:class:`Opened` (data, bitmap) and :class:`Attach` (what to attach). After :class:`Payload` follow ``size`` raw bytes
outside any frame.

:class:`Hello` and its replies must stay readable by every version: fields may be added with defaults, never changed.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from . import errors
from .config import Origin
from .errors import CacheError, ConfigError, NearflashError
from .frames import frame
from .shard import ObjectStat

VERSIONS = (3, 2)
"""Protocol versions that this code speaks, newest first. 3 has plans."""
WITH_PLANS = 3
PAGE_ITEMS = 1000
"""Lists are sent in pages of this many, to fit into frames."""


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


class Attachment(msgspec.Struct, frozen=True, tag_field="t", tag="attachment"):
    """What is attached to a leased entry under this name: :class:`Payload`, or :class:`Attached` if there is none."""

    lease: int
    name: str


class Attach(msgspec.Struct, frozen=True, tag_field="t", tag="attach"):
    """Attach the bytes of the one descriptor that comes along, a sealed file, to a leased entry."""

    lease: int
    name: str


class Prefetch(msgspec.Struct, frozen=True, tag_field="t", tag="prefetch"):
    items: list[Item]


class Plan(msgspec.Struct, frozen=True, tag_field="t", tag="plan"):
    """A piece of a plan, which takes the place of the session's former one of this ``name``. Answered by
    :class:`Planned`.

    First comes an offer without content: sessions that offer plans of one ``job`` and ``digest`` share one, which is
    sent once. The pieces follow in order; ``start`` counts the objects and uses in those before. ``uses`` are (number
    of the object in the plan, first position, last position). An empty ``digest`` withdraws the plan.
    """

    name: str
    digest: str
    job: str = ""
    share: float = 1.0
    position: int = 0
    start: int = 0
    objects: list[Item] = []
    uses: list[tuple[int, int, int]] = []
    last: bool = False


class Progress(msgspec.Struct, frozen=True, tag_field="t", tag="progress"):
    """The reader of a plan is about to read ``position``. Answered by :class:`Planned`."""

    name: str
    position: int


class Pause(msgspec.Struct, frozen=True, tag_field="t", tag="pause"):
    """Of these plans nothing is read until the next :class:`Progress`; no reply, unknown ones are ignored."""

    names: list[str]


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


class Attached(msgspec.Struct, frozen=True, tag_field="t", tag="attached"):
    """Whether something of that name is attached now; ``known`` as in :class:`Waited`."""

    there: bool
    known: bool = True


class Payload(msgspec.Struct, frozen=True, tag_field="t", tag="payload"):
    size: int


class Done(msgspec.Struct, frozen=True, tag_field="t", tag="done"):
    pass


class Planned(msgspec.Struct, frozen=True, tag_field="t", tag="planned"):
    """``state`` is "known" (nothing more to send), "more" (the next piece), "lost" (send it from the beginning: the
    daemon is another one, or the pieces do not fit together) or "refused" (it holds too much already)."""

    state: str


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


OfLease = Wait | Release | Attachment | Attach
Ahead = Prefetch | Plan | Progress | Pause
Request = Hello | Open | OfLease | Fetch | Ahead | List | Stat | Entries | Evict | Stats | Stop
OfObject = Opened | Waited | Attached | Payload
Reply = Welcome | OfObject | Done | Planned | StatPage | EntryPage | Evicted | StatsReply | Failed

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
    return frame(body)


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
