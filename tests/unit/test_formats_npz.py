"""Zip archives that are damaged, hostile or unusual."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import pytest

from cachefs.errors import FormatError, UnknownFormat
from loader.formats import Npz, detect_bytes
from loader.formats.npy_header import read_header
from loader.formats.zip_members import content_of, members

RANDOM = np.random.default_rng(0).bytes(3000)


def arr(raw: bytes | bytearray) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(raw), np.uint8)


def archive(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED, *, zip64: bool = False) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, content in entries.items():
            with file.open(name, "w", force_zip64=zip64) as member:
                member.write(content)
    return bytearray(out.getvalue())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("zip64", [False, True])
def test_members_read_back(method: int, zip64: bool) -> None:
    entries = {"a": RANDOM, "b": bytes(3 << 20), "c/d": b"", "é": b"x"}
    data = arr(archive(entries, method, zip64=zip64))
    found = members(data, "z")
    assert {m.name: content_of(data, m, "z").tobytes() for m in found} == entries
    if method == zipfile.ZIP_STORED:
        assert all(np.shares_memory(content_of(data, m, "z"), data) for m in found if m.size)


def test_very_many_members_need_the_zip64_end() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for i in range(66_000):
            file.writestr(zipfile.ZipInfo(f"{i}"), b"")
    raw = bytearray(out.getvalue())
    assert len(members(arr(raw), "z")) == 66_000
    raw[raw.rfind(b"PK\x06\x06") + 1] ^= 1
    with pytest.raises(FormatError, match="Zip64"):
        members(arr(raw), "z")


def test_every_cut_is_found() -> None:
    raw = archive({"a.npy": RANDOM[:200], "b.npy": RANDOM[:50]}, zipfile.ZIP_DEFLATED)
    for size in range(len(raw)):
        with pytest.raises(FormatError):
            members(arr(raw[:size]), "z")


def test_members_may_not_share_bytes() -> None:
    raw = archive({"a": RANDOM, "b": RANDOM})
    second = raw.rfind(b"PK\x01\x02")
    raw[second + 46 : second + 47] = b"a"
    raw[second + 42 : second + 46] = bytes(4)  # the entry of b is a's once more
    with pytest.raises(FormatError, match="overlap"):
        members(arr(raw), "z")


def test_encrypted_members_are_named() -> None:
    raw = archive({"a": RANDOM})
    raw[raw.rfind(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(UnknownFormat, match="'a' is encrypted"):
        members(arr(raw), "z")


@pytest.mark.parametrize("wrong", [0, 2999, 3001, 60_000])
def test_a_stream_of_another_size_than_declared(wrong: int) -> None:
    raw = archive({"a": bytes(3000)}, zipfile.ZIP_DEFLATED)
    entry = raw.rfind(b"PK\x01\x02")
    raw[entry + 24 : entry + 28] = wrong.to_bytes(4, "little")
    data = arr(raw)
    with pytest.raises(FormatError, match=r"'a' (is not of the size|declares a size)"):
        content_of(data, members(data, "z")[0], "z")


def test_a_bomb_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = archive({f"{i}": bytes(1 << 20) for i in range(4)}, zipfile.ZIP_DEFLATED)
    assert len(members(arr(raw), "z")) == 4
    monkeypatch.setattr("loader.formats.zip_members.MOST", 3 << 20)
    with pytest.raises(FormatError, match="decompresses to more than"):
        members(arr(raw), "z")


def test_damage_is_found_once_and_told_each_time() -> None:
    out = io.BytesIO()
    np.savez(out, x=np.arange(500), y=np.arange(500))
    raw = bytearray(out.getvalue())
    raw[1000] ^= 1
    data = arr(raw)
    index = Npz().index(data, "z")
    source = Npz().source(data, index)
    for i in (0, 499):
        with pytest.raises(FormatError, match=r"'x\.npy' does not match its CRC"):
            Npz().read(source, index, i, "z")
        assert Npz().read(source, index, i, "z", frozenset({"y"})) == {"y": i}


def test_options_and_detection() -> None:
    format = Npz(arrays=("x", "y"), rows=False)
    assert Npz.from_options(format.options()) == format and hash(format)
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        save(out, np.arange(3))
        assert isinstance(detect_bytes(arr(out.getvalue()), "z"), Npz)


def test_a_header_that_lacks_something_is_no_cause_of_itself() -> None:
    head = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + b"{'descr': '<u2'}".ljust(117) + b"\n"
    with pytest.raises(FormatError, match="damaged NumPy header") as error:
        read_header(np.frombuffer(head, np.uint8), len(head), "x")
    assert error.value.__cause__ is None


@pytest.mark.parametrize("shape", ["(2,)", "(2L,)"])
def test_the_names_of_fields_are_not_taken_for_old_numbers(shape: str) -> None:
    text = f"{{'descr': [('10L', '<u2'), ('x', '<u4')], 'fortran_order': False, 'shape': {shape}, }}"
    head = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.encode().ljust(117) + b"\n"
    header = read_header(np.frombuffer(head, np.uint8), len(head) + 12, "x")
    assert header.shape == (2,)
    if shape == "(2,)":
        assert header.dtype.names == ("10L", "x")
