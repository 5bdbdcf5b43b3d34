"""The client of a node's cache: opens objects, lists them, asks for them ahead of time.

``connect()`` costs nothing: the daemon is contacted, and started if there is none, by the first call that needs it.
Local paths never need it.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from . import protocol
from .clock import SYSTEM_CLOCK, Clock
from .config import Settings
from .connection import Connection, unexpected
from .declaring import Terms, declare, default_job, progress
from .errors import Changed
from .forklock import ForkLock
from .local import LocalShard, list_folder, read_file, stat_file
from .objstore.url import parse_url
from .protocol import EntryInfo, Evicted
from .recall import Recall
from .remote import RemoteShard, fetch_into
from .session import Session
from .shard import FillingView, ObjectStat, Shard
from .waiting import OpenArgs

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Client", "EntryInfo", "Evicted", "FillingView", "ObjectStat", "Shard", "connect"]

_READ_PIECE = 4 << 20
_READ_TRIES = 3
"""An object that is replaced while it is read is read anew this often."""

Page = TypeVar("Page", protocol.StatPage, protocol.EntryPage)


def connect(settings: Settings | None = None, **overrides: Any) -> Client:
    """A client for ``settings``, or for :meth:`Settings.load`, with ``overrides`` that are not ``None`` on top.

    Contacts nobody yet.
    """
    if settings is None:
        settings = Settings.load(**overrides)
    elif overrides:
        settings = settings.with_(**{name: value for name, value in overrides.items() if value is not None})
    return Client(settings)


class Client:
    """One process's access to the node's cache; synchronous, usable from several threads.

    A forked child goes on with the same object over a connection of its own; a pickled client is its settings and
    connects anew. Errors are those of :mod:`cachefs.errors`. ``recall``: a little memory for those who use it.
    """

    def __init__(self, settings: Settings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.settings = settings
        self.recall = Recall()
        self._clock = clock
        self._current: Session | None = None
        self._guard = ForkLock()

    def open(
        self,
        url: str | os.PathLike[str],
        *,
        version: str | None = None,
        size: int | None = None,
        deadline: float | None = None,
    ) -> Shard:
        """Open one object and start fetching it if this node lacks it. Does not wait for bytes.

        ``version`` and ``size`` as a listing gave them save the request that asks the origin; an object that has
        moved on is ``Changed``. Without them the version is what the origin said at most 10 s ago. ``deadline``
        (seconds) bounds this call and each later wait of the shard; without it a wait ends with ``DeadlineExceeded``
        once nothing arrived for ``settings.request_deadline``. Local paths and ``file://`` are mapped in place.
        """
        target = parse_url(url)
        if target.is_local:
            return LocalShard(target.key, version=version, size=size)
        stall, private = self.settings.request_deadline, self.settings.passthrough_bytes
        return RemoteShard(self._session, OpenArgs(str(target), version, size, deadline, stall, private))

    def list(self, url: str | os.PathLike[str], *, delimiter: bool = False, cached: bool = False) -> list[ObjectStat]:
        """The objects in the folder ``url`` and below it, in key order; folder markers are left out.

        The URL of a bucket lists all of it; a missing ``/`` at the end is added, so ``s3://b/data`` never lists
        ``s3://b/data2``. With ``delimiter`` only the folder's own objects, and its subfolders as prefixes (see
        :class:`ObjectStat`). ``cached`` fills in ``cached_bytes`` (0 otherwise).
        """
        target = parse_url(url)
        if target.is_local:
            return list_folder(target.key, delimiter=delimiter)
        pages = self._session().exchange(protocol.List(str(target), delimiter, cached), _pages(protocol.StatPage))
        return [item for page in pages for item in page.items]

    def stat(self, url: str | os.PathLike[str]) -> ObjectStat:
        """Size, version and cached bytes of one object, as the origin has it now."""
        target = parse_url(url)
        if target.is_local:
            return stat_file(target.key)
        reply, _ = self._session().call(protocol.Stat(str(target)))
        if not isinstance(reply, protocol.StatPage) or len(reply.items) != 1:
            raise unexpected(reply)
        return reply.items[0]

    def read(self, url: str | os.PathLike[str]) -> bytes:
        """A small object whole (an index, a manifest), as it is now, past the cache."""
        target = parse_url(url)
        if target.is_local:
            return read_file(target.key)
        tries = 0
        while True:
            tries += 1
            try:
                return self._read_once(str(target))
            except Changed:
                if tries == _READ_TRIES:
                    raise

    def prefetch(self, urls: Iterable[str | ObjectStat]) -> None:
        """Ask for objects ahead of time, in this order; returns at once. Local paths are left alone."""
        wanted = [item for item in map(_item, urls) if item is not None]
        for start in range(0, len(wanted), protocol.PAGE_ITEMS):
            self._session().call(protocol.Prefetch(wanted[start : start + protocol.PAGE_ITEMS]))

    def plan(
        self,
        name: str,
        objects: Sequence[ObjectStat],
        uses: Sequence[tuple[int, int, int]],
        *,
        position: int = 0,
        job: str | None = None,
        share: float | None = None,
    ) -> bool:
        """Declare what this process will read, so that the daemon brings it in ahead of need and keeps what pays most.

        ``uses`` are ``(number in objects, first position, last position)``: the object is read between these positions
        of a count of the caller's own (samples, batches), which :meth:`progress` goes by; ``position`` is where it
        stands. Declare the next epoch's uses too: what they need is worth keeping. ``objects`` are as a listing gave
        them; local ones are left out. A later plan of this ``name`` takes its place, one without objects ends it, and
        so do :meth:`withdraw` and :meth:`close`.

        Processes of one ``job`` (default: what the launcher names so, else this process group) that declare the same
        share one plan, which is where the last of them is. Each job gets its part of the cache by ``share`` (default:
        ``settings.job_share``), and what others do not use. False if the daemon takes no plan (an older one, or one
        that holds too many) or ``settings.plans`` is off: :meth:`prefetch` then. Left by an exception, no plan of this
        name remains.
        """
        if not self.settings.plans:
            return False
        terms = Terms(
            name,
            position,
            default_job() if job is None else job,
            self.settings.job_share if share is None else share,
        )
        return declare(self._session(), terms, objects, uses)

    def progress(self, name: str, position: int) -> bool:
        """The next that is read of plan ``name`` is ``position``. False if the daemon does not know the plan: declare
        it anew (another daemon may have taken over)."""
        return self.settings.plans and progress(self._session(), name, position)

    def pause(self, name: str) -> None:
        """Nothing more is read of plan ``name`` until the next :meth:`progress`: nothing is brought in for it, and what
        it needs is kept only as long as no plan that is being read needs the space.

        Starts no daemon, raises nothing and waits for no lock, so that finalizers may call it: the daemon is told now,
        if a connection is idle, else with the next request.
        """
        session = self._present()
        if session is not None:
            session.pause(name)
            session.flush()

    def withdraw(self, name: str) -> None:
        """Plan ``name`` is over, if there is one; the daemon is told with the next request. For finalizers, too."""
        session = self._present()
        if session is not None:
            session.withdraw(name)

    def entries(self) -> builtins.list[EntryInfo]:
        """All objects in the node's cache."""
        pages = self._session().exchange(protocol.Entries(), _pages(protocol.EntryPage))
        return [item for page in pages for item in page.items]

    def evict(self, urls: Iterable[str | os.PathLike[str]] | None) -> Evicted:
        """Drop every version of these URLs (``None``: of everything) that nobody has open. Local files are left alone.

        Returns how many entries and bytes went, and how many stay because they are in use.
        """
        if urls is None:
            return self._evict(protocol.Evict([], everything=True))
        targets = [str(target) for target in map(parse_url, urls) if not target.is_local]
        total = Evicted(0, 0, 0)
        for start in range(0, len(targets), protocol.PAGE_ITEMS):
            gone = self._evict(protocol.Evict(targets[start : start + protocol.PAGE_ITEMS]))
            total = Evicted(total.entries + gone.entries, total.bytes + gone.bytes, total.busy + gone.busy)
        return total

    def stats(self) -> dict[str, float | int | str | None]:
        """The daemon's counters and gauges, its process, and the cache's use of the disk (bytes)."""
        reply, _ = self._session().call(protocol.Stats())
        if not isinstance(reply, protocol.StatsReply):
            raise unexpected(reply)
        return reply.values

    def stop_daemon(self) -> None:
        """Ask the daemon to end; it does so within a few seconds. Open shards stay readable."""
        self._session().call(protocol.Stop())

    def close(self) -> None:
        """Close this process's connections and give back its leases. Idempotent; open shards stay readable."""
        with self._guard.of_this_process():
            current, self._current = self._current, None
        if current is not None:
            current.close()

    def _session(self) -> Session:
        """This process's session; a forked child drops the inherited one without disturbing the parent's."""
        session = self._current
        if session is not None and session.pid == os.getpid():
            return session
        with self._guard.of_this_process():
            session = self._current
            if session is None or session.pid != os.getpid():
                if session is not None:
                    session.abandon()
                session = self._current = self._new_session()
            return session

    def _present(self) -> Session | None:
        """This process's session if it has one; takes no lock."""
        session = self._current
        return session if session is not None and session.pid == os.getpid() else None

    def _new_session(self) -> Session:
        return Session(self.settings, self._clock)

    def _read_once(self, url: str) -> bytes:
        found = self.stat(url)
        data = bytearray(found.size)
        memory = memoryview(data)
        for start in range(0, found.size, _READ_PIECE):
            end = min(start + _READ_PIECE, found.size)
            request = protocol.Fetch(found.url, found.version, found.size, start, end)
            fetch_into(self._session(), request, memory[start:end])
        return bytes(data)

    def _evict(self, request: protocol.Evict) -> Evicted:
        reply, _ = self._session().call(request)
        if not isinstance(reply, Evicted):
            raise unexpected(reply)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Client, (self.settings,))

    def __repr__(self) -> str:
        return f"<Client of {self.settings.cache_dir}>"


def _item(item: str | os.PathLike[str] | ObjectStat) -> protocol.Item | None:
    if isinstance(item, ObjectStat):
        target, version, size = parse_url(item.url), item.version, item.size
    else:
        target, version, size = parse_url(item), None, None
    return None if target.is_local else protocol.Item(str(target), version, size)


def _pages(kind: type[Page]) -> Callable[[Connection, float], list[Page]]:
    """Reads a reply of several pages to its end."""

    def receive(connection: Connection, seconds: float) -> list[Page]:
        pages: list[Page] = []
        while True:
            reply, _ = connection.receive(timeout=seconds)
            if not isinstance(reply, kind):
                raise unexpected(reply)
            pages.append(reply)
            if reply.last:
                return pages

    return receive
