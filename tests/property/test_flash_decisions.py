"""The flash store's pure decisions: what to evict, whether it fits, what a crashed directory means."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachefs.attachments import MOST_PER_ENTRY
from cachefs.bitmap import BitmapReader, ChunkBits
from cachefs.flash.eviction import Candidate, choose_victims
from cachefs.flash.fileops import Found
from cachefs.flash.layout import Place
from cachefs.flash.quota import Ledger, most_bytes, shortfall
from cachefs.flash.recovery import Kept, Leftover, Listing, Pair, decide
from cachefs.flash.sidecar import EntryKey, make_header, parse_header

CANDIDATES = st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10)), max_size=12).map(
    lambda rows: [Candidate(f"{i:02d}", size, float(i)) for i, (size, _) in enumerate(rows)]
)


@given(CANDIDATES, st.integers(-5, 500))
def test_lru_evicts_the_shortest_prefix_that_is_enough(candidates: list[Candidate], need: int) -> None:
    victims = choose_victims(iter(candidates), need)
    assert victims == candidates[: len(victims)]
    if victims:
        assert sum(v.disk_bytes for v in victims) >= need
        assert sum(v.disk_bytes for v in victims[:-1]) < need
    else:
        assert need <= 0 or sum(c.disk_bytes for c in candidates) < need


@given(CANDIDATES, st.integers(1, 500))
def test_partly_takes_all_there_is(candidates: list[Candidate], need: int) -> None:
    victims = choose_victims(candidates, need, partly=True)
    assert victims == (choose_victims(candidates, need) or candidates)


AMOUNT = st.integers(0, 1 << 40)


@given(AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT)
def test_shortfall_is_exactly_what_must_come_free(
    need: int, used: int, quota: int, available: int, pending: int, floor: int
) -> None:
    def fits(freed: int) -> bool:
        return used - freed + need <= quota and available + freed - pending - floor >= need

    short = shortfall(need, used=used, quota=quota, available=available, pending=pending, floor=floor)
    assert fits(max(short, 0))
    assert short <= 0 or not fits(short - 1)


def test_what_others_may_write_into_the_directory_counts() -> None:
    ledger = Ledger(quota=300, floor=0, headroom=10, reserved=40)
    assert ledger.used == 40
    assert not ledger.never_fits(250)
    assert ledger.never_fits(251)
    ledger.reserve(250)
    assert ledger.short_of(1, available=10**9) == 1


@given(st.lists(st.tuples(st.sampled_from(["reserve", "settle", "drop"]), st.integers(1, 100)), max_size=40))
def test_the_ledger_never_promises_more_than_the_quota(steps: list[tuple[str, int]]) -> None:
    ledger = Ledger(quota=300, floor=0, headroom=10)
    reserved: list[int] = []
    charged: list[int] = []
    for what, amount in steps:
        if what == "reserve" and ledger.short_of(amount, 10**9) <= 0:
            ledger.reserve(amount)
            reserved.append(amount)
        elif what == "settle" and reserved:
            size = reserved.pop()
            ledger.allocated(size)
            charged.append(size // 2)
            ledger.charge(size // 2 - size)
        elif what == "drop" and charged:
            ledger.credit(charged.pop())
        assert ledger.used == sum(reserved) + sum(charged) <= ledger.quota - ledger.headroom
        assert ledger.pending == sum(reserved)


@given(st.integers(0, 1 << 45), st.sampled_from([512, 4096, 65536]))
def test_the_estimate_covers_data_and_sidecar(size: int, block: int) -> None:
    n = -(-size // (8 << 20))
    assert most_bytes(size, 200 + 8 * n, n, block) >= size + 200 + 8 * n


# --- recovery -------------------------------------------------------------------------------------------------------

NAMES = ["a" * 40, "b" * 40, "c" * 40]
MTIME = st.floats(0, 1e9)


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Pair]:
    out = {}
    for name in NAMES:
        data = Found(f"{name}.data", 1, 4096, draw(MTIME)) if draw(st.booleans()) else None
        meta = Found(f"{name}.meta", 1, 4096, draw(MTIME)) if draw(st.booleans()) else None
        if data or meta:
            out[name] = Pair(data, meta)
    return out


DYING = st.lists(st.sampled_from([f"{n}.{i:08x}.data" for n in NAMES for i in range(2)]), unique=True).map(
    lambda names: tuple(Found(n, 1, 4096, 0.0) for n in names)
)


ATTACHED_NAMES = [f"{n}.{a}.{s}" for n in NAMES for a in "pqrstuvwxy" for s in ("att", "new")]


@st.composite
def attachments(draw: st.DrawFn) -> dict[str, tuple[Found, ...]]:
    out: dict[str, tuple[Found, ...]] = {}
    for file in draw(st.lists(st.sampled_from(ATTACHED_NAMES), unique=True)):
        out[file[:40]] = (*out.get(file[:40], ()), Found(file, 1, 4096, draw(MTIME)))
    return out


def files(listing: Listing) -> set[tuple[Place, str]]:
    out = {(Place.DYING, f.name) for f in listing.dying}
    out |= {(Place.ATTACHED, f.name) for found in listing.attached.values() for f in found}
    for place, found in ((Place.ENTRIES, listing.entries), (Place.FILLING, listing.filling)):
        out |= {(place, f.name) for pair in found.values() for f in (pair.data, pair.meta) if f}
    return out


@given(pairs(), pairs(), DYING, attachments())
def test_recovery_accounts_for_every_file_once(
    entries: dict[str, Pair],
    filling: dict[str, Pair],
    dying: tuple[Found, ...],
    attached: dict[str, tuple[Found, ...]],
) -> None:
    listing = Listing(entries, filling, dying, attached)
    verdict = decide(listing)
    seen = [(k.place, k.data.name) for k in verdict.kept] + [(k.meta_place, k.meta.name) for k in verdict.kept]
    seen += [(Place.ATTACHED, f.name) for k in verdict.kept for f in k.attached]
    seen += [(left.place, left.file.name) for left in verdict.leftovers]
    assert len(seen) == len(set(seen))
    assert set(seen) == files(listing)
    assert [k.meta.mtime for k in verdict.kept] == sorted(k.meta.mtime for k in verdict.kept)


@given(pairs(), pairs(), DYING, attachments())
def test_recovery_keeps_attachments_with_their_entries_alone(
    entries: dict[str, Pair],
    filling: dict[str, Pair],
    dying: tuple[Found, ...],
    attached: dict[str, tuple[Found, ...]],
) -> None:
    verdict = decide(Listing(entries, filling, dying, attached))
    without = decide(Listing(entries, filling, dying))
    assert [k._replace(attached=()) for k in verdict.kept] == list(without.kept), "they change nothing else"
    for kept in verdict.kept:
        whole = sorted(f.mtime for f in attached.get(kept.name, ()) if f.name.endswith(".att"))
        assert [f.mtime for f in kept.attached] == whole[-MOST_PER_ENTRY:]
        assert all(f.name.startswith(f"{kept.name}.") and f.name.endswith(".att") for f in kept.attached)


@given(pairs(), pairs(), DYING, attachments())
def test_recovery_settles(
    entries: dict[str, Pair],
    filling: dict[str, Pair],
    dying: tuple[Found, ...],
    attached: dict[str, tuple[Found, ...]],
) -> None:
    verdict = decide(Listing(entries, filling, dying, attached))
    after: dict[Place, dict[str, Pair]] = {Place.ENTRIES: {}, Place.FILLING: {}}
    for kept in verdict.kept:
        after[kept.place][kept.name] = Pair(kept.data, kept.meta)
    own = {kept.name: kept.attached for kept in verdict.kept}
    again = decide(Listing(after[Place.ENTRIES], after[Place.FILLING], attached=own))
    assert again.leftovers == ()
    assert [k._replace(meta_place=k.place) for k in verdict.kept] == list(again.kept)


def test_recovery_knows_the_crash_of_each_step() -> None:
    name = NAMES[0]
    data, meta = Found(f"{name}.data", 1, 1, 0.0), Found(f"{name}.meta", 1, 1, 0.0)
    filling, published = Place.FILLING, Place.ENTRIES
    created = decide(Listing(filling={name: Pair(data)}))
    assert created.kept == () and created.leftovers == (Leftover(name, filling, data),)
    half = decide(Listing(entries={name: Pair(data)}, filling={name: Pair(None, meta)}))
    assert half.kept == (Kept(name, data, meta, published, filling),) and half.leftovers == ()
    evicted = decide(Listing(entries={name: Pair(data)}))
    assert evicted.kept == () and evicted.leftovers == (Leftover(name, published, data),)


# --- formats --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(blacklist_categories=()), max_size=50).filter(lambda t: _can_encode(t))


def _can_encode(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


@given(TEXT, TEXT, TEXT, st.integers(0, 1 << 50), st.integers(1, 1 << 20).map(lambda n: n * 65536))
def test_sidecar_headers_round_trip(endpoint: str, url: str, version: str, size: int, chunk: int) -> None:
    header, raw = make_header(EntryKey(endpoint, url, version), size, chunk)
    assert parse_header(raw) == header
    assert header.key == EntryKey(endpoint, url, version) and header.table_offset == len(raw)


@given(st.lists(st.booleans(), max_size=300), st.data())
def test_the_bitmap_agrees_with_a_list(flags: list[bool], data: st.DataObject) -> None:
    bits = ChunkBits(len(flags), bytes(flags))
    for i in data.draw(st.lists(st.integers(0, max(len(flags) - 1, 0)), max_size=5)) if flags else []:
        assert bits.set(i) is not flags[i]
        flags[i] = True
    start = data.draw(st.integers(0, len(flags)))
    end = data.draw(st.integers(start, len(flags)))
    with BitmapReader(bits.fd) as reader:
        expected = next((i for i in range(start, end) if not flags[i]), None)
        assert reader.first_missing(start, end) == expected
        assert reader.all_set is all(flags)
    assert bits.missing() == [i for i, flag in enumerate(flags) if not flag]
    assert bits.count == sum(flags)
    bits.close()
