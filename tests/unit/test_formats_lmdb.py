"""LMDB files that are damaged or foreign, made by changing single numbers of a real one."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachefs.errors import ConfigError, FormatError, UnknownFormat
from loader.formats import Lmdb, detect_bytes
from loader.formats.lmdb_meta import MAGIC
from loader.formats.lmdb_pages import HEADER

lmdb = pytest.importorskip("lmdb")
PAGE = 4096


@pytest.fixture
def raw(tmp_path: Path) -> bytearray:
    """Three hundred records, some of them in overflow pages, in a tree of two levels."""
    with (
        lmdb.open(str(tmp_path / "db"), subdir=False, lock=False, map_size=1 << 24) as env,
        env.begin(write=True) as transaction,
    ):
        for i in range(300):
            transaction.put(b"%04d" % i, b"v" * (5000 if i % 100 == 7 else i))
    return bytearray((tmp_path / "db").read_bytes())


def arr(raw: bytes | bytearray) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(raw), np.uint8)


def index(raw: bytes | bytearray) -> Any:
    return Lmdb().index(arr(raw), "db")


def meta(raw: bytearray) -> int:
    """Where the meta page begins that holds."""
    return max((0, PAGE), key=lambda at: struct.unpack_from("<Q", raw, at + 144)[0])


def root(raw: bytearray) -> int:
    return int(struct.unpack_from("<Q", raw, meta(raw) + 128)[0])


def test_the_index_is_small_and_can_be_sent(raw: bytearray) -> None:
    made = index(raw)
    assert len(made) == 300 and made.nbytes < 300 * 40
    again = pickle.loads(pickle.dumps(made))
    data = arr(raw)
    for i in (0, 7, 299):
        one, other = (Lmdb().read(data, which, i, "db") for which in (made, again))
        assert one["__key__"] == other["__key__"] == f"{i:04d}"
        assert one["value"].tobytes() == other["value"].tobytes() == b"v" * (5000 if i == 7 else i)
    assert "value" not in Lmdb().read(data, made, 0, "db", frozenset())


def test_options_survive_being_written_down() -> None:
    format = Lmdb(database="train", group=False, skip=("a", "b"), text=())
    assert Lmdb.from_options(format.options()) == format and hash(format)
    with pytest.raises(ConfigError, match="skip"):
        Lmdb(skip="length")  # type: ignore[arg-type]


def test_other_kinds_of_lmdb_are_named(raw: bytearray) -> None:
    version = bytearray(raw)
    for at in (0, PAGE):
        version[at + 20] = 2
    swapped = bytearray(raw)
    swapped[16:20] = MAGIC[::-1]
    short = bytearray(raw)
    short[12:16], short[6:8] = MAGIC, b"\x08\x00"
    short[16:20] = bytes(4)
    for changed, what in ((version, "data version 2"), (swapped, "big-endian"), (short, "32-bit")):
        assert isinstance(detect_bytes(arr(changed), "db"), Lmdb)
        with pytest.raises(UnknownFormat, match=what):
            index(changed)


@pytest.mark.parametrize("size", [0, 1, 100, 4097, 5000, 1 << 20, 0xFFFFFFFF])
def test_a_page_size_that_cannot_be(raw: bytearray, size: int) -> None:
    struct.pack_into("<I", raw, 40, size)
    with pytest.raises(FormatError):
        index(raw)


def test_a_root_outside_of_the_file(raw: bytearray) -> None:
    for page in (0, 1, 1 << 20, 1 << 62, (1 << 64) - 2):
        struct.pack_into("<Q", raw, meta(raw) + 128, page)
        with pytest.raises(FormatError, match=r"page \d+"):
            index(raw)


def test_a_tree_that_leads_back_to_itself(raw: bytearray) -> None:
    top = root(raw) * PAGE
    first, second = struct.unpack_from("<HH", raw, top + HEADER)
    leaf = raw[top + first : top + first + 6]
    raw[top + second : top + second + 6] = leaf
    with pytest.raises(FormatError, match="twice"):
        index(raw)
    struct.pack_into("<HHH", raw, top + first, root(raw), 0, 0)
    with pytest.raises(FormatError, match="twice"):
        index(raw)


def test_counts_and_depths_that_are_wrong(raw: bytearray) -> None:
    at = meta(raw) + 88
    for offset, form, value, what in (
        (32, "<Q", 299, "299"),
        (32, "<Q", 1 << 60, "description says"),
        (6, "<H", 0, "0 levels"),
        (6, "<H", 60_000, "60000 levels"),
        (6, "<H", 1, "another kind"),
        (6, "<H", 3, "another kind|page"),
    ):
        changed = bytearray(raw)
        struct.pack_into(form, changed, at + offset, value)
        with pytest.raises(FormatError, match=what):
            index(changed)


def test_a_damaged_record_keeps_its_place(raw: bytearray) -> None:
    made = index(raw)
    big = int(made.records.at[7])
    struct.pack_into("<I", raw, big - 4, 1)  # fewer overflow pages than the value takes
    node = int(made.records.key_at[20]) - 8
    struct.pack_into("<HH", raw, node, 0xFFFF, 0x7FFF)  # a value of 2 GiB
    data = arr(raw)
    found = Lmdb().index(data, "db")
    assert len(found) == 300
    for i in range(300):
        if i in (7, 20):
            with pytest.raises(FormatError, match=rf"db at byte \d+: the record of sample {i}"):
                Lmdb().read(data, found, i, "db")
        else:
            assert len(Lmdb().read(data, found, i, "db")["value"]) == (5000 if i % 100 == 7 else i)


def test_a_node_outside_of_its_page(raw: bytearray) -> None:
    node = int(index(raw).records.key_at[0]) - 8
    page = node // PAGE * PAGE
    for offset in (0, 3, PAGE - 2, 0xFFFE):
        changed = bytearray(raw)
        struct.pack_into("<H", changed, page + HEADER, offset)
        with pytest.raises(FormatError, match="node"):
            index(changed)
    struct.pack_into("<H", raw, page + 12, PAGE)  # more nodes than have room
    struct.pack_into("<H", raw, page + 14, PAGE)
    with pytest.raises(FormatError, match="room"):
        index(raw)


def test_many_values_of_no_size_on_a_small_page_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), subdir=False, lock=False, map_size=1 << 24, max_dbs=1) as env:
        database = env.open_db(b"d", dupsort=True, dupfixed=True)
        with env.begin(write=True, db=database) as transaction:
            for i in range(5):
                transaction.put(b"key", b"%08d" % i)
    raw = bytearray((tmp_path / "db").read_bytes())
    assert len(index(raw)) == 5
    at = raw.index(b"00000000") - HEADER  # the page within the node
    struct.pack_into("<H", raw, at + 8, 0)
    struct.pack_into("<H", raw, at + 12, 0xFFFE)
    with pytest.raises(FormatError, match="page of values"):
        index(raw)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_branch_page_without_nodes(raw: bytearray, depth: int) -> None:
    struct.pack_into("<H", raw, root(raw) * PAGE + 12, HEADER)
    struct.pack_into("<H", raw, meta(raw) + 88 + 6, depth)
    with pytest.raises(FormatError, match="branch of nothing"):
        index(raw)
