"""The sidecar format."""

from __future__ import annotations

import struct

import pytest

from cachefs.flash.sidecar import Damaged, EntryKey, Foreign, Header, make_header, parse_digests, parse_header
from cachefs.hashing import name_digest

KEY = EntryKey("http://e", "s3://b/../x \udcff", "v")


def test_what_is_written_is_read() -> None:
    header, raw = make_header(KEY, 200_000, 65536)
    assert parse_header(raw) == header
    assert header.n_chunks == 4 and header.file_bytes == len(raw) + 32
    assert [header.chunk_bytes(i) for i in range(4)] == [65536, 65536, 65536, 200_000 - 3 * 65536]
    assert len(raw) % 64 == 0


def test_the_name_comes_from_all_parts_and_no_path() -> None:
    assert KEY.name == name_digest("http://e", "s3://b/../x \udcff", "v")
    assert len({EntryKey(*p).name for p in [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "ab", "c")]}) == 4


@pytest.mark.parametrize("url", ["k", "k/1", "K", "//", "d/../../esc.bin", "x" * 300, "é", "e\u0301", "y" * 5000])
def test_any_url_fits(url: str) -> None:
    header, raw = make_header(EntryKey("", url, ""), 1, 65536)
    short = parse_header(raw[:4096])
    if isinstance(short, int):  # a long URL: it says how much more it needs
        short = parse_header(raw[:short])
    assert short == header


def test_every_bit_of_the_header_counts() -> None:
    header, raw = make_header(EntryKey("e", "u", "v"), 10, 65536)
    described = 32 + struct.unpack_from("<I", raw, 16)[0]
    for bit in range(8 * described):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = parse_header(bytes(flipped))
        except (Damaged, Foreign):
            continue
        assert not isinstance(found, Header) or found == header, f"bit {bit} went unnoticed"


def test_another_version_is_foreign_and_not_damaged() -> None:
    _, raw = make_header(KEY, 1, 65536)
    with pytest.raises(Foreign):
        parse_header(raw[:8] + struct.pack("<I", 2) + raw[12:])
    with pytest.raises(Foreign):
        parse_header(b"#!/bin/sh\necho hello, I am the user's own file\n")


@pytest.mark.parametrize("raw", [b"", b"NFSIDECR", bytes(4096)])
def test_what_a_power_cut_leaves_is_damaged(raw: bytes) -> None:
    with pytest.raises(Damaged):
        parse_header(raw)


def test_a_short_table_is_damaged() -> None:
    assert list(parse_digests(bytes(8) + b"\1" + bytes(7), 2)) == [0, 1]
    with pytest.raises(Damaged):
        parse_digests(bytes(15), 2)
