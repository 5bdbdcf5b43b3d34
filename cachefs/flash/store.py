"""The flash store: a node's cached objects in one directory, within a quota."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Settings
from ..errors import CacheError, CacheFull, DeadlineExceeded, DiskFault
from ..metrics import Metrics
from .attached import Attachments
from .entry import Entry
from .entryinfo import EntryInfo, describe
from .eviction import Ranking
from .fileops import FileOps
from .health import Health, disk_error
from .index import Index, Slot
from .layout import Layout, meta_name
from .lifecycle import Lifecycle
from .lock import DirectoryLock, prepare_directory
from .parts import Parts
from .quota import HEADROOM_BLOCKS, Ledger, Usage
from .sidecar import EntryKey
from .space import Space
from .takeover import take_over

_WAIT = 60.0
"""Seconds to wait for another thread that makes the same entry, or for operations to end."""
_STAMP_INTERVAL = 60.0
"""The time of last use is written to disk at most this often per entry (seconds)."""


class FlashStore:
    """Entries on flash, by key. Thread-safe; owned by the process that holds the directory's lock.

    Whatever touches the disk may raise :class:`DiskFault` or :class:`CacheFull`. A fault is remembered
    (:attr:`fault`): until a later probe finds the disk well, making and writing entries fails at once with it, while
    entries that can be read still are.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        lock: DirectoryLock,
        metrics: Metrics,
        clock: Clock,
        ops: FileOps,
        reserved: int,
        ranking: Ranking | None,
    ) -> None:
        headroom = HEADROOM_BLOCKS * layout.block_bytes
        index = Index(Ledger(settings.quota or 0, settings.free_floor, headroom, reserved))
        health = Health(layout.path, clock, metrics, self._probe)
        self._parts = Parts(ops, layout, index, health, metrics, clock)
        self._dir_lock = lock
        self._space = Space(self._parts)
        self._lifecycle = Lifecycle(self._parts, self._space, settings.chunk_size)
        take_over(self._parts, self._space, self._lifecycle, settings.quota)
        if ranking is not None:
            index.rank_by(ranking)
        self.attachments = Attachments(self._parts, self._space)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        metrics: Metrics,
        clock: Clock = SYSTEM_CLOCK,
        ops: FileOps | None = None,
        reserved: int = 0,
        ranking: Ranking | None = None,
    ) -> FlashStore:
        """Open or make the store in ``settings.cache_dir`` and tidy up after its last owner. Reads no data file.

        ``reserved`` bytes of the quota are the caller's, for its own files in the directory. ``ranking`` says which
        entries go first, in the place of the least recently used.
        Raises :class:`CacheError` naming the pid if another process has it, or if the path is not a directory or
        belongs to another user; :class:`DiskFault` if the disk refuses. A disk that can only be read gives a store
        that serves what it has.
        """
        ops = ops or FileOps()
        prepare_directory(settings.cache_dir, settings.socket)
        with _as_disk_error(settings, "locking it"):
            lock = DirectoryLock.take(settings.cache_dir, ops)
        try:
            with _as_disk_error(settings, "opening it"):
                layout = Layout.open(settings.cache_dir, ops)
                try:
                    return cls(settings, layout, lock, metrics, clock, ops, reserved, ranking)
                except BaseException:
                    layout.close()
                    raise
        except BaseException:
            lock.close()
            raise

    @property
    def fault(self) -> CacheFull | DiskFault | None:
        """Why nothing can be written now, or None."""
        return self._parts.health.fault

    def check(self) -> None:
        """Raise the remembered fault; if it is time, look at the disk anew first and forget the fault if it is well."""
        self._parts.health.check()

    def lookup(self, key: EntryKey, *, lease: bool = False) -> Entry | None:
        """The entry of ``key``, published or still filling, or None. Counts as a use.

        With ``lease`` it comes with one lease taken in the same step, so that it cannot be evicted in between.
        Raises :class:`DiskFault` if the directory has vanished.
        """
        index = self._parts.index
        with index.lock:
            index.require_open()
            slot = index.live.get(key.name)
        if slot is None:
            return None
        entry = self._lifecycle.load(slot)
        if entry is None or entry.key != key:
            return None
        now = self._parts.clock.time()
        with index.lock:
            if not index.is_live(slot):
                return None
            index.touch(slot, now, opened=lease)
            slot.leases += lease
            stale = now - slot.stamped >= _STAMP_INTERVAL
            if stale:
                slot.stamped = now
        if self.fault is None:
            if stale:
                self._stamp(slot)
            if entry.complete and not slot.published:
                self._lifecycle.publish(slot)  # failed before
        return entry

    def create(self, key: EntryKey, size: int, *, lease: bool = False, ahead: bool = False) -> Entry:
        """A new entry of ``size`` bytes to be filled: space reserved (evicting entries that nobody uses or holds, as
        they are ranked), files made.

        An entry that is there already is returned if it has this size. With ``lease`` it comes with one lease;
        ``ahead``: nobody waits for it yet.
        Raises :class:`CacheFull` if quota or disk leave no room (nothing is evicted in vain) or a file that is not
        ours is in the way, :class:`DiskFault` if the disk refuses, :class:`CacheError` if another size is cached under
        the same version.
        """
        self.check()
        with self._lifecycle.sole_creator(key):
            found = self.lookup(key, lease=lease)
            if found is None:
                return self._lifecycle.make(key, size, lease=lease, ahead=ahead)
        if found.size != size:
            if lease:
                found.release()
            raise CacheError(f"cached with {found.size} bytes, not {size}, at the same version", url=key.url)
        return found

    def info(self, key: EntryKey) -> EntryInfo | None:
        """What there is of one object; does not count as a use."""
        with self._parts.index.lock:
            self._parts.index.require_open()
            slot = self._parts.index.live.get(key.name)
        return None if slot is None else self._describe(slot)

    def entries(self) -> list[EntryInfo]:
        """All entries, least recently used first. Reads the sidecars of those not used since the store was opened."""
        index = self._parts.index
        with index.lock:
            index.require_open()
            slots = list(index.live.values())
        return [info for slot in slots if (info := self._describe(slot)) is not None]

    def evict(self, name: str) -> int:
        """Give up one entry by :attr:`EntryInfo.name`; returns the bytes that came free at once.

        0 if there is none, or if somebody still holds the file: the space follows when they let go. Raises
        :class:`CacheError` if it is leased.
        """
        index = self._parts.index
        with index.lock:
            index.require_open()
            slot = index.live.get(name)
            if slot is None:
                return 0
            if slot.in_use:
                raise CacheError(f"in use by {slot.leases} readers", url=slot.file, hint="evict it when they are done")
            size = slot.charge
            self._space.locked_bury(slot)
        self._space.drop_dying()
        return 0 if slot.charge else size

    def usage(self) -> Usage:
        """The space taken now; ``used`` never exceeds the quota."""
        return self._space.usage()

    def drop_dying(self) -> None:
        """Remove evicted files that nobody holds any more and credit their space. Cheap; call it now and then."""
        self._space.drop_dying()

    def close(self) -> None:
        """Close all files and give up the lock; idempotent. Waits for operations under way in other threads.

        Raises :class:`DeadlineExceeded` if one does not end; the lock then stays until the process does.
        """
        index = self._parts.index
        with index.lock:
            if index.closed:
                return
            index.closed = True
            slots = [*index.live.values(), *index.dying.values()]
            if not index.changed.wait_for(lambda: not index.busy(slots), _WAIT):
                raise DeadlineExceeded(f"an operation did not end in {_WAIT:.0f} s", url=str(self._parts.layout.path))
            files = []
            for entry in (s.entry for s in slots if s.entry is not None):
                files.append(entry.files.detach())
                entry.abandon()
        for file in files:
            if file is not None:
                file.close()
        if self.fault is None:
            for slot in index.live.values():
                if slot.last_use > slot.stamped:
                    self._stamp(slot)
        self._parts.layout.close()
        self._dir_lock.close()

    def __enter__(self) -> FlashStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        self._parts.layout.check_reachable()
        try:
            self._dir_lock.renew()
        except CacheError as e:
            raise DiskFault(e.what, url=e.url, hint=e.hint) from e
        self._parts.layout.probe()

    def _describe(self, slot: Slot) -> EntryInfo | None:
        entry = self._lifecycle.load(slot)
        return None if entry is None else describe(slot, entry)

    def _stamp(self, slot: Slot) -> None:
        try:
            self._parts.ops.touch(meta_name(slot.name), slot.last_use, dir_fd=self._parts.layout.fd(slot.meta_place))
        except FileNotFoundError:
            pass  # published or evicted in between; only the order of eviction after a restart depends on it
        except OSError as e:
            self._parts.health.note(e, self._parts.layout.file(slot.meta_place, slot.file), "stamping its last use")


@contextmanager
def _as_disk_error(settings: Settings, doing: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except OSError as e:
        raise disk_error(e, settings.cache_dir, doing) from e
