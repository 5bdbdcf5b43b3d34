"""The flash store: a node's cached objects in one directory, within a quota."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ..bitmap import ChunkBits
from ..clock import SYSTEM_CLOCK, Clock
from ..config import Settings
from ..errors import CacheError, CacheFull, DeadlineExceeded, DiskFault
from ..metrics import Metrics
from . import recovery
from .chunkfile import ChunkFile, read_header
from .entry import Entry
from .eviction import Candidate, choose_victims
from .fileops import FileOps
from .health import Health, disk_error
from .index import Index, Slot, live_slot
from .layout import Layout, Place, data_name, dying_name, meta_name
from .lock import DirectoryLock, prepare_directory
from .quota import HEADROOM_BLOCKS, Ledger, Usage, most_bytes
from .sidecar import Damaged, EntryKey, Foreign, Header, make_header

_WAIT = 60.0
"""Seconds to wait for another thread that makes the same entry, frees space or ends an operation."""
_STAMP_INTERVAL = 60.0
"""The time of last use is written to disk at most this often per entry (seconds)."""
_DEFAULT_SHARE = 0.8


@dataclass(frozen=True)
class EntryInfo:
    """One entry in a listing. ``disk_bytes`` is what it is accounted for, ``cached_bytes`` what of ``size`` is on disk;
    ``state`` is ``"filling"`` or ``"published"``; ``last_use`` in seconds since the epoch."""

    name: str
    endpoint: str
    url: str
    version: str
    size: int
    disk_bytes: int
    cached_bytes: int
    state: str
    leases: int
    last_use: float


class FlashStore:
    """Entries on flash, by key. Thread-safe; owned by the process that holds the directory's lock.

    Everything that touches the disk may raise :class:`DiskFault` or :class:`CacheFull`. A fault is remembered
    (:attr:`fault`): until a later probe finds the disk well, making and writing entries fails at once with it, while
    entries that can be read still are.
    """

    def __init__(
        self, settings: Settings, layout: Layout, lock: DirectoryLock, metrics: Metrics, clock: Clock, ops: FileOps
    ) -> None:
        self.ops = ops
        self.layout = layout
        self.metrics = metrics
        self._settings = settings
        self._clock = clock
        self._dir_lock = lock
        self._block = ops.block_bytes(layout.tree_fd)
        self._serial = 0
        self.index = Index(Ledger(0, settings.free_floor, HEADROOM_BLOCKS * self._block))
        self.health = Health(layout.path, clock, metrics, self._probe)
        self._untidy = False

    @classmethod
    def open(
        cls, settings: Settings, *, metrics: Metrics, clock: Clock = SYSTEM_CLOCK, ops: FileOps | None = None
    ) -> FlashStore:
        """Open or make the store in ``settings.cache_dir`` and tidy up after its last owner. Reads no data file.

        Raises :class:`CacheError` naming the pid if another process has it, if the directory is not a directory or
        belongs to another user; :class:`DiskFault` if the disk refuses. A disk that can only be read gives a store
        that serves what it has.
        """
        ops = ops or FileOps()
        prepare_directory(settings.cache_dir)
        try:
            lock = DirectoryLock.take(settings.cache_dir, ops)
        except OSError as e:
            raise e if isinstance(e, CacheError) else disk_error(e, settings.cache_dir, "locking it") from e
        try:
            layout = Layout.open(settings.cache_dir, ops)
            try:
                store = cls(settings, layout, lock, metrics, clock, ops)
                store._recover()
            except BaseException:
                layout.close()
                raise
        except OSError as e:
            lock.close()
            raise e if isinstance(e, CacheError) else disk_error(e, settings.cache_dir, "opening it") from e
        except BaseException:
            lock.close()
            raise
        return store

    @property
    def fault(self) -> CacheFull | DiskFault | None:
        """Why nothing can be written now, or None."""
        return self.health.fault

    # --- entries ----------------------------------------------------------------------------------------------------

    def lookup(self, key: EntryKey, *, lease: bool = False) -> Entry | None:
        """The entry of ``key``, published or still filling, or None. Counts as a use.

        With ``lease`` the entry comes with one lease taken in the same step, so that it cannot be evicted in between.
        Raises :class:`DiskFault` if the directory has vanished.
        """
        with self.index.lock:
            self.index.require_open()
            slot = self.index.live.get(key.name)
        if slot is None:
            return None
        entry = slot.entry or self._load(slot)
        if entry is None or entry.key != key:
            return None
        now = self._clock.time()
        with self.index.lock:
            if not self.index.is_live(slot):
                return None
            self.index.touch(slot, now)
            slot.leases += lease
            stamp = now - slot.stamped >= _STAMP_INTERVAL
            if stamp:
                slot.stamped = now
        if stamp:
            self._stamp(slot)
        if entry.complete and slot.place is Place.FILLING and self.health.fault is None:
            self.publish(entry)
        return entry

    def create(self, key: EntryKey, size: int, *, lease: bool = False) -> Entry:
        """A new entry to be filled: space reserved (evicting least recently used entries nobody holds), files made.

        An entry that is there already is returned if it has this size. With ``lease`` it comes with one lease.
        Raises :class:`CacheFull` if quota or disk leave no room (nothing is evicted in vain), :class:`DiskFault` if
        the disk refuses, and :class:`CacheError` if another size is cached under the same version.
        """
        self.health.check()
        self._tidy()
        name = key.name
        with self.index.lock:
            self.index.require_open()
            if name in self.index.blocked:
                raise CacheFull("a file of an unknown format is in the way", url=str(self.layout.path / name))
            if not self.index.changed.wait_for(lambda: name not in self.index.creating, _WAIT):
                raise DeadlineExceeded("another thread is still making this entry", url=key.url)
            self.index.creating.add(name)
        try:
            found = self.lookup(key, lease=lease)
            if found is not None:
                if found.size != size:
                    if lease:
                        found.release()
                    raise CacheError(f"cached with {found.size} bytes, not {size}, at the same version", url=key.url)
                return found
            entry = self._make(key, size, lease)
        finally:
            with self.index.lock:
                self.index.creating.discard(name)
                self.index.changed.notify_all()
        if entry.complete:
            self.publish(entry)
        return entry

    def entries(self) -> list[EntryInfo]:
        """All entries, least recently used first. Reads their sidecars."""
        with self.index.lock:
            self.index.require_open()
            slots = list(self.index.live.values())
        return [info for slot in slots if (info := self._describe(slot)) is not None]

    def evict(self, name: str) -> int:
        """Give up one entry by :attr:`EntryInfo.name`; returns the bytes that came free at once.

        0 if there is none, or if somebody still holds the file: the space follows when they let go. Raises
        :class:`CacheError` if it is leased.
        """
        with self.index.lock:
            self.index.require_open()
            slot = self.index.live.get(name)
            if slot is None:
                return 0
            if slot.in_use:
                raise CacheError(f"in use by {slot.leases} readers", url=slot.file, hint="evict it when they are done")
            size = slot.charge
            self._bury(slot)
        self.drop_dying()
        return 0 if slot.charge else size

    def usage(self) -> Usage:
        """The space taken now; never more than the quota."""
        available = self.ops.free_bytes(self.layout.tree_fd)
        with self.index.lock:
            ledger = self.index.ledger
            self._weigh_directories()
            free = max(0, -ledger.short_of(0, available))
            return Usage(ledger.quota, ledger.used, free, self.index.dying_bytes(), len(self.index.live))

    def drop_dying(self) -> None:
        """Remove evicted files that nobody holds any more and credit their space. Cheap; call it now and then."""
        with self.index.lock:
            self.index.require_open()
            slots = [s for s in self.index.dying.values() if not s.in_use and not s.dropping]
            for slot in slots:
                slot.dropping = True
        for slot in slots:
            self._drop(slot)

    def close(self) -> None:
        """Close all files and give up the lock; idempotent. Waits for operations under way in other threads.

        Raises :class:`DeadlineExceeded` if one does not end; the lock then stays until the process does.
        """
        with self.index.lock:
            if self.index.closed:
                return
            self.index.closed = True
            slots = [*self.index.live.values(), *self.index.dying.values()]
            quiet = self.index.changed.wait_for(lambda: not any(s.pins or s.dropping for s in slots), _WAIT)
            if not quiet:
                raise DeadlineExceeded(f"an operation did not end in {_WAIT:.0f} s", url=str(self.layout.path))
            files = [file for s in slots if s.entry and (file := s.entry.detach())]
        for file in files:
            file.close()
        self.layout.close()
        self._dir_lock.close()

    def __enter__(self) -> FlashStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- for entries ------------------------------------------------------------------------------------------------

    def publish(self, entry: Entry) -> None:
        """Move a complete entry from ``filling`` to ``entries``: the data, then the sidecar.

        A failure is remembered as the store's fault and not raised: the chunks can be read where they are, and the
        next look-up tries again.
        """
        slot = entry.slot
        source, target = self.layout.fd(Place.FILLING), self.layout.fd(Place.ENTRIES)
        with self.index.lock:
            if slot.place is not Place.FILLING or not self.index.is_live(slot):
                return
            try:
                self.ops.rename(slot.file, slot.file, src_fd=source, dst_fd=target)
                meta = meta_name(slot.name)
                self.ops.rename(meta, meta, src_fd=source, dst_fd=target)
                slot.place = Place.ENTRIES
                size = sum(
                    self.ops.stat(file, dir_fd=target).st_blocks * 512 for file in (slot.file, meta_name(slot.name))
                )
            except OSError as e:
                self.health.note(e, self.layout.file(Place.FILLING, slot.file), "publishing it")
                return
            self.index.ledger.charge(size - slot.charge)
            slot.charge = size
            self._weigh_directories()
        self.metrics.add("flash_published")

    def heal(self, entry: Entry, chunk: int) -> None:
        """Give up an entry with a bad chunk; its next creation makes a new file."""
        slot = entry.slot
        with self.index.lock:
            if not self.index.is_live(slot):
                return
            entry.mark_superseded()
            self._bury(slot)
        self.metrics.add("flash_healed")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        listing = recovery.list_tree(self.layout, self.ops)
        verdict = recovery.decide(listing)
        self._serial = recovery.next_serial(listing)
        try:
            self._serial = recovery.execute(verdict.steps, self.layout, self.ops, self._serial)
            dying = recovery.list_tree(self.layout, self.ops).dying if verdict.steps else listing.dying
        except OSError as e:
            self.health.note(e, self.layout.path, "tidying it")
            self._untidy = True
            dying = listing.dying
        ledger = self.index.ledger
        for name, (place, pair) in sorted(
            verdict.keep.items(), key=lambda kv: kv[1][1].meta.mtime if kv[1][1].meta else 0
        ):
            assert pair.data and pair.meta
            charge = pair.disk_bytes
            if place is Place.FILLING:
                charge = max(charge, most_bytes(pair.data.size, pair.meta.size, pair.meta.size // 8, self._block))
            ledger.charge(charge)
            self.index.add(live_slot(name, place, charge, pair.meta.mtime))
        for found in dying:
            ledger.charge(found.disk_bytes)
            slot = Slot(found.name.split(".")[0], Place.DYING, found.name, found.disk_bytes, found.mtime)
            self.index.dying[found.name] = slot
        self._weigh_directories()
        quota = self._settings.quota
        if quota is None:
            quota = int((ledger.used + self.ops.free_bytes(self.layout.tree_fd)) * _DEFAULT_SHARE)
        ledger.quota = quota
        self.metrics.set("flash_quota_bytes", quota)
        if self.health.fault is None:
            self.drop_dying()
            self._shrink()

    def _shrink(self) -> None:
        """Evict what a smaller quota than before leaves no room for."""
        with self.index.lock:
            over = self.index.ledger.used - self.index.ledger.quota
            for victim in choose_victims(self._candidates(), over):
                self._bury(self.index.live[victim.name])
        if over > 0:
            self.drop_dying()

    def _tidy(self) -> None:
        if self._untidy:
            self._untidy = False
            listing = recovery.list_tree(self.layout, self.ops)
            self._serial = recovery.execute(recovery.decide(listing).steps, self.layout, self.ops, self._serial)

    def _probe(self) -> None:
        self.layout.check_present()
        tree = self.layout.tree_fd
        try:
            self.ops.unlink("probe", dir_fd=tree)
        except FileNotFoundError:
            pass
        fd = self.ops.create("probe", dir_fd=tree)
        try:
            self.ops.write(fd, bytes(4096), 0)
            self.ops.sync(fd)
        finally:
            self.ops.close(fd)
            self.ops.unlink("probe", dir_fd=tree)

    def _load(self, slot: Slot) -> Entry | None:
        """Read an entry's header; None (and the slot is gone) if its files are damaged or not ours."""
        place = slot.place
        dir_fd = self.layout.fd(place)
        try:
            fd = self.ops.open(meta_name(slot.name), dir_fd=dir_fd)
            try:
                header = read_header(self.ops, fd)
            finally:
                self.ops.close(fd)
            size = self.ops.stat(slot.file, dir_fd=dir_fd).st_size
            if header.key.name != slot.name or size != header.size:
                raise Damaged("the sidecar does not belong to the data")
        except Foreign:
            with self.index.lock:
                self.index.blocked.add(slot.name)
                if self.index.is_live(slot):
                    self.index.forget(slot)
            self.metrics.add("flash_foreign_ignored")
            return None
        except (Damaged, FileNotFoundError) as e:
            if isinstance(e, FileNotFoundError):
                self.layout.check_present()
            self.metrics.add("flash_bad_entries")
            with self.index.lock:
                if self.index.is_live(slot) and not slot.in_use and slot.place is place:
                    self._bury(slot)
            return None
        except OSError as e:
            raise self.health.note(e, self.layout.file(place, slot.file), "reading its sidecar") from e
        with self.index.lock:
            if slot.entry is None:
                slot.entry = Entry(self, slot, header)
            return slot.entry

    def _describe(self, slot: Slot) -> EntryInfo | None:
        entry = slot.entry or self._load(slot)
        if entry is None:
            return None
        cached = entry.size
        if slot.place is Place.FILLING and not entry.complete:
            absent = set(entry.missing()) - set(entry.needs_verify())
            cached -= sum(min(entry.chunk_size, entry.size - i * entry.chunk_size) for i in absent)
        return EntryInfo(
            name=slot.name,
            endpoint=entry.key.endpoint,
            url=entry.key.url,
            version=entry.key.version,
            size=entry.size,
            disk_bytes=slot.charge,
            cached_bytes=cached,
            state="filling" if slot.place is Place.FILLING else "published",
            leases=slot.leases,
            last_use=slot.last_use,
        )

    def _stamp(self, slot: Slot) -> None:
        try:
            self.ops.touch(meta_name(slot.name), slot.last_use, dir_fd=self.layout.fd(slot.place))
        except FileNotFoundError:
            pass  # published or evicted in between; only the order of eviction after a restart depends on it
        except OSError as e:
            self.health.note(e, self.layout.file(slot.place, meta_name(slot.name)), "stamping its last use")

    def _make(self, key: EntryKey, size: int, lease: bool) -> Entry:
        header, raw = make_header(key, size, self._settings.chunk_size)
        need = most_bytes(size, header.file_bytes, header.n_chunks, self._block)
        self._reserve(key, size, need)
        name = key.name
        try:
            file = self._make_files(name, header, raw)
        except OSError as e:
            with self.index.lock:
                self.index.ledger.allocated(need)
                self.index.ledger.credit(need)
            path = self.layout.file(Place.FILLING, data_name(name))
            raise self.health.note(e, path, f"making an entry of {size} bytes") from e
        slot = live_slot(name, Place.FILLING, need, self._clock.time())
        slot.pins = 1
        slot.entry = entry = Entry(self, slot, header, file)
        with self.index.lock:
            self.index.ledger.allocated(need)
            self.index.add(slot)
            slot.leases += lease
        entry.unpin()
        self.metrics.add("flash_created")
        return entry

    def _make_files(self, name: str, header: Header, raw: bytes) -> ChunkFile:
        dir_fd = self.layout.fd(Place.FILLING)
        data, meta = data_name(name), meta_name(name)
        open_fds: list[int] = []
        made: list[str] = []
        try:
            open_fds.append(self.ops.create(data, dir_fd=dir_fd))
            made.append(data)
            self.ops.allocate(open_fds[0], header.size)
            open_fds.append(self.ops.create(meta, dir_fd=dir_fd))
            made.append(meta)
            self.ops.write(open_fds[1], raw + bytes(8 * header.n_chunks), 0)
            digests = array("Q", bytes(8 * header.n_chunks))
            return ChunkFile(self.ops, header, open_fds[0], open_fds[1], digests, ChunkBits(header.n_chunks))
        except OSError:
            for fd in open_fds:
                self.ops.close(fd)
            for file in made:
                self.ops.unlink(file, dir_fd=dir_fd)
            raise

    def _reserve(self, key: EntryKey, size: int, need: int) -> None:
        ledger = self.index.ledger
        if need + ledger.directories + ledger.headroom > ledger.quota:
            raise CacheFull(
                f"its {size} bytes do not fit into the quota of {ledger.quota} bytes",
                url=key.url,
                hint="raise the quota",
            )
        while True:
            self.drop_dying()
            available = self.ops.free_bytes(self.layout.tree_fd)
            with self.index.lock:
                self.index.require_open()
                self._weigh_directories()
                short = ledger.short_of(need, available)
                if short <= 0:
                    ledger.reserve(need)
                    return
                victims = choose_victims(self._candidates(), short)
                if not victims:
                    dropping = any(slot.dropping for slot in self.index.dying.values())
                    if dropping and self.index.changed.wait(_WAIT):
                        continue
                    raise CacheFull(
                        f"no room for its {size} bytes: {short} bytes short with a quota of {ledger.quota}, "
                        f"{ledger.used} in use and {available} free on disk; the rest is held by readers",
                        url=key.url,
                        hint="raise the quota, or lower the free-space floor",
                    )
                for victim in victims:
                    self._bury(self.index.live[victim.name])
                    self.metrics.add("flash_evicted")
                    self.metrics.add("flash_evicted_bytes", victim.disk_bytes)

    def _candidates(self) -> Iterator[Candidate]:
        """Entries that nobody uses or holds, least recently used first; looks at their files one by one."""
        for slot in list(self.index.live.values()):
            if not slot.in_use and not self._is_held(slot):
                yield Candidate(slot.name, slot.charge, slot.last_use)

    def _is_held(self, slot: Slot) -> bool:
        try:
            fd = self.ops.open(slot.file, dir_fd=self.layout.fd(slot.place))
        except FileNotFoundError:
            return False
        try:
            # Where the system cannot tell, leases alone decide: a reader that keeps a map after giving its lease back
            # still holds space which is credited too early.
            return bool(self.ops.is_held(fd))
        finally:
            self.ops.close(fd)

    def _bury(self, slot: Slot) -> None:
        """Make an entry invisible and move its file to ``dying``. The index lock is held."""
        dir_fd = self.layout.fd(slot.place)
        try:
            self._gone_is_fine(lambda: self.ops.unlink(meta_name(slot.name), dir_fd=dir_fd))
            target = dying_name(slot.name, self._serial)
            self._serial += 1
            dying_fd = self.layout.fd(Place.DYING)
            self._gone_is_fine(lambda: self.ops.rename(slot.file, target, src_fd=dir_fd, dst_fd=dying_fd))
        except OSError as e:
            raise self.health.note(e, self.layout.file(slot.place, slot.file), "evicting it") from e
        slot.place, slot.file = Place.DYING, target
        self.index.bury(slot)

    def _gone_is_fine(self, call: Callable[[], None]) -> None:
        try:
            call()
        except FileNotFoundError:
            self.layout.check_present()

    def _drop(self, slot: Slot) -> None:
        dir_fd = self.layout.fd(slot.place)
        gone = False
        try:
            try:
                gone = not self._is_held(slot)
                if gone:
                    self._gone_is_fine(lambda: self.ops.unlink(slot.file, dir_fd=dir_fd))
            except OSError as e:
                gone = False
                self.health.note(e, self.layout.file(slot.place, slot.file), "removing it")
        finally:
            with self.index.lock:
                slot.dropping = False
                if gone:
                    self.index.forget(slot)
                self.index.changed.notify_all()

    def _weigh_directories(self) -> None:
        self.index.ledger.directories = self.layout.directory_bytes()
        self.metrics.set("flash_used_bytes", self.index.ledger.used)
