"""A model of the flash store: any sequence of calls, crashes and restarts keeps its promises."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachefs.errors import CacheError, CacheFull
from cachefs.flash import Entry
from cachefs.testing.clock import ManualClock
from cachefs.testing.diskops import Crash, CrashingOps
from cachefs.testing.flashkit import CHUNK, Reader, Thing, disk_usage, files_of, flip_bit, open_store, thing

pytestmark = pytest.mark.timeout(600)  # a failing example is shrunk within the test

THINGS = [thing("a", CHUNK), thing("b", 3 * CHUNK - 1), thing("c", 4 * CHUNK), thing("d", 4 * CHUNK), thing("e", 0)]
QUOTAS = [0, 5 * CHUNK, 7 * CHUNK, 9 * CHUNK, 11 * CHUNK, 40 * CHUNK]
LATER = b"NFSIDECR\2\0\0\0" + bytes(40)
FOREIGN = {
    "orig.tar": b"o" * 100,
    "nearflash-v1/entries/notes.txt": b"n",
    f"nearflash-v1/entries/{'0' * 40}.meta": LATER,
    f"nearflash-v1/entries/{'1' * 40}.meta": LATER,
    f"nearflash-v1/entries/{'1' * 40}.data": b"data of a later version",
    f"nearflash-v1/filling/{'2' * 40}.meta": b"somebody's own file of that name, whatever it may be",
    "nearflash-v1/dying/keep.data": b"k",
}
BARE = 14 * 4096
"""More than directories and foreign files take by themselves."""
WHAT = st.sampled_from(THINGS)
PLACES = st.lists(st.floats(0, 0.999), min_size=1, max_size=3)
PICK = st.integers(0, 1000)


ATTACHMENT = st.sampled_from("pqrstuvwxy")


def derived(what: Thing, name: str, size: int) -> bytes:
    """What is attached under a name: bytes that fit no other object and no other name."""
    return random.Random(f"{what.key.url} {name}").randbytes(size)


class StoreMachine(RuleBasedStateMachine):
    """The model is what each object's bytes are, which leases are held, and which readers have maps."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="flash-model-"))
        self.clock = ManualClock()
        self.leases: list[tuple[Thing, Entry]] = []
        self.readers: list[tuple[Thing, Reader]] = []
        self.healed: list[Entry] = []

    @initialize(quota=st.sampled_from(QUOTAS))
    def begin(self, quota: int) -> None:
        open_store(self.folder).close()
        for name, content in FOREIGN.items():
            (self.folder / name).write_bytes(content)
        self.open(quota)

    def open(self, quota: int) -> None:
        self.quota = quota
        self.leases.clear()
        self.ops = CrashingOps()
        self.store = open_store(self.folder, quota, clock=self.clock, ops=self.ops)
        used = self.store.usage().used
        # A smaller quota than before cannot be met while readers hold more than that; nor below the bare directories.
        assert used <= quota or self.readers or used <= BARE, used
        self.most = max(quota, used)

    def teardown(self) -> None:
        for _, reader in self.readers:
            reader.close()
        self.store.close()
        shutil.rmtree(self.folder)

    def allowed(self, call: Callable[[], object]) -> None:
        """The call may find no room, or an entry gone or in use; anything else is a failure."""
        try:
            call()
        except CacheError as e:
            assert isinstance(e, CacheFull) or "gone" in str(e) or "in use" in str(e), e
            assert self.store.fault is None

    def complete(self, what: Thing, entry: Entry) -> None:
        """Verify or write every chunk."""
        for i in entry.missing():
            if entry.verify_chunk(i):
                continue
            if entry.superseded:
                self.healed.append(entry)
                return
            entry.write_chunk(i, what.chunk(i))
        assert entry.complete and entry.missing() == []

    # --- calls ------------------------------------------------------------------------------------------------------

    @rule(what=WHAT)
    def lease(self, what: Thing) -> None:
        self.clock.advance(1)
        self.allowed(lambda: self.leases.append((what, self.store.create(what.key, len(what.data), lease=True))))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, chunk=st.integers(0, 3))
    def write_one(self, pick: int, chunk: int) -> None:
        what, entry = self.leases[pick % len(self.leases)]
        if what.n_chunks:
            i = chunk % what.n_chunks
            try:
                entry.write_chunk(i, what.chunk(i))
            except CacheError as e:  # published before, and rotten
                assert "gone" in str(e) and entry.superseded
                self.healed.append(entry)
            else:
                assert i not in entry.missing()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def write_all(self, pick: int) -> None:
        what, entry = self.leases[pick % len(self.leases)]
        if not entry.superseded:
            self.complete(what, entry)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.leases.pop(pick % len(self.leases))[1].release()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def read(self, pick: int) -> None:
        what, entry = self.leases[pick % len(self.leases)]
        self.allowed(lambda: self.readers.append((what, Reader(entry))))

    @rule(what=WHAT, hold=st.booleans())
    def use(self, what: Thing, hold: bool) -> None:
        """What a client does to read a whole object; with ``hold`` its map outlives the lease."""
        self.clock.advance(1)
        try:
            entry = self.store.create(what.key, len(what.data), lease=True)
        except CacheFull:
            return
        reader = Reader(entry)
        self.complete(what, entry)
        assert reader.wrong(what) == []
        entry.release()
        if hold:
            self.readers.append((what, reader))
        else:
            reader.close()

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def stop_reading(self, pick: int) -> None:
        self.readers.pop(pick % len(self.readers))[1].close()

    @rule(what=WHAT)
    def evict(self, what: Thing) -> None:
        self.allowed(lambda: self.store.evict(what.key.name))
        if not any(what is t for t, _ in self.leases):
            assert self.store.lookup(what.key) is None

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, name=ATTACHMENT, size=st.sampled_from([0, 5000, CHUNK, 3 * CHUNK]))
    def attach(self, pick: int, name: str, size: int) -> None:
        what, entry = self.leases[pick % len(self.leases)]
        self.allowed(lambda: self.store.attachments.keep(entry, name, derived(what, name, size)))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, name=ATTACHMENT)
    def read_attached(self, pick: int, name: str) -> None:
        what, entry = self.leases[pick % len(self.leases)]
        found: list[bytes | None] = [None]

        def read() -> None:
            found[0] = self.store.attachments.read(entry, name)

        self.allowed(read)
        assert found[0] is None or found[0] == derived(what, name, len(found[0]))

    @rule()
    def drop_dying(self) -> None:
        self.store.drop_dying()
        if not self.readers and not self.leases and all(i.state == "published" for i in self.store.entries()):
            assert self.store.usage().dying == 0

    # --- ends of a process ------------------------------------------------------------------------------------------

    @rule(quota=st.sampled_from(QUOTAS))
    def restart(self, quota: int) -> None:
        self.store.close()
        self.open(quota)

    @rule(n=st.integers(1, 20), what=WHAT, evict=st.booleans(), name=st.none() | ATTACHMENT)
    def crash(self, n: int, what: Thing, evict: bool, name: str | None) -> None:
        """Die at the n-th change from here, a reader looking on, or not at all if less happens."""
        self.ops.arm(n)
        try:
            entry = self.store.create(what.key, len(what.data), lease=True)
            self.readers.append((what, Reader(entry)))
            if name is not None:
                self.allowed(lambda: self.store.attachments.keep(entry, name, derived(what, name, 5000)))
            self.complete(what, entry)
            entry.release()
            if evict:
                self.store.evict(entry.name)
        except Crash:
            self.ops.release()
            self.open(self.quota)
        except CacheError as e:
            assert isinstance(e, CacheFull) or "in use" in str(e), e
        finally:
            self.ops.arm(0)

    @rule(n=st.integers(1, 6))
    def crash_while_opening(self, n: int) -> None:
        self.store.close()
        ops = CrashingOps()
        ops.arm(n)
        try:
            open_store(self.folder, self.quota, clock=self.clock, ops=ops).close()
        except Crash:
            pass
        finally:
            ops.release()
        self.open(self.quota)

    @rule(what=WHAT, places=PLACES, kind=st.sampled_from(["data", "meta"]))
    def rot(self, what: Thing, places: list[float], kind: str) -> None:
        """Bits flip while nothing runs."""
        while self.readers:  # who has the file mapped would see it at once
            self.stop_reading(0)
        self.restart(self.quota)
        entry = self.store.lookup(what.key)
        self.store.close()
        path = files_of(self.folder, entry).get(kind) if entry is not None else None
        if path is not None and path.stat().st_size:
            # Not in the sidecar's magic and version: that would make it somebody else's file, to be left alone.
            first = 12 if kind == "meta" else 0
            for place in places:
                flip_bit(path, first + int(place * (path.stat().st_size - first)))
        self.open(self.quota)
        for _ in range(2):  # a bad chunk makes the first find a new entry for the second
            self.use(what, hold=False)

    # --- promises ---------------------------------------------------------------------------------------------------

    @invariant()
    def no_wrong_byte_is_ever_visible(self) -> None:
        for what, reader in self.readers:
            assert reader.wrong(what) == []

    @invariant()
    def usage_is_true_and_within_the_quota(self) -> None:
        foreign = sum((self.folder / name).lstat().st_blocks * 512 for name in FOREIGN)
        on_disk = disk_usage(self.folder, [reader for _, reader in self.readers]) - foreign
        assert on_disk <= self.store.usage().used <= self.most

    @invariant()
    def nothing_foreign_is_touched(self) -> None:
        for name, content in FOREIGN.items():
            assert (self.folder / name).read_bytes() == content

    @invariant()
    def no_attachment_is_left_without_its_entry(self) -> None:
        live = {info.name for info in self.store.entries()}
        dying = self.store.usage().dying
        left = [p for p in (self.folder / "nearflash-v1" / "attached").iterdir() if p.name[:40] not in live]
        assert sum(p.stat().st_blocks * 512 for p in left) <= dying

    @invariant()
    def leased_entries_stay(self) -> None:
        live = {info.name: info.leases for info in self.store.entries()}
        for what, entry in self.leases:
            if entry in self.healed:
                assert entry.superseded
            else:
                assert not entry.superseded and live[what.key.name] > 0

    @invariant()
    def no_descriptor_is_lost(self) -> None:
        """Directories and lock; a leased entry's files; the old file of each entry that is healing."""
        healing = sum(info.state == "filling" for info in self.store.entries())
        assert len(self.ops.open_fds) <= 7 + 2 * len(self.leases) + healing


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
