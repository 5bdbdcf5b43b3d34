"""Tar headers that are checked many at once, against the walk that looks at one after the other: the same members, the
same notes, the same errors, whatever the archive holds."""

from __future__ import annotations

import io
import tarfile
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import FormatError
from loader.formats import WebDataset
from loader.formats.abc import Ready, all_there
from loader.formats.tar import TarNotes, walk
from loader.formats.tar_index import TarIndex
from loader.formats.tar_runs import Pace, RunFinder
from loader.formats.tar_samples import TarSamples
from loader.testing import tar_bytes

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
FIELDS = (".txt", ".cls", ".JPG", ".seg.png", ".json", ".jpg")


def entry(rng: np.random.Generator, number: int, format: int, style: int, odd: float, times: bool) -> bytes:
    """One entry of an archive, without the end marker."""
    out = io.BytesIO()
    key = (f"{number // 2:06d}", f"{number // 3}", f"d.{number % 3}/é{number // 5}", "x" * (number // 4 % 90))[style]
    name: str = key + FIELDS[int(rng.integers(2 + style))]
    info = tarfile.TarInfo(name)
    info.mtime = number + 0.25 if times else number
    data = rng.bytes(int(rng.choice([0, 1, 200, 511, 512, 513, 1500, 6000])))
    kind = rng.random()
    if kind < odd:
        which = int(rng.integers(12))
        if which == 0:
            info.type, info.linkname, data = tarfile.SYMTYPE, "x" * int(rng.choice([3, 120])), b""
        elif which == 1:
            info.type, data = tarfile.DIRTYPE, b""
        elif which == 2:
            info.name = "y" * int(rng.integers(90, 300)) + ".txt"
        elif which == 3:
            info.name = str(
                rng.choice(["README", ".hidden", "__meta__/a.txt", "__x__.txt", "a.b/.txt", "a/.txt", "k."])
            )
        elif which == 4:
            info.name = f"{'p' * 60}/{'q' * 70}/{number}.txt"
        elif which == 5:
            info.pax_headers = [{"mtime": "1.5"}, {"mtime": "1\n9 path=q"}, {"mtime": "", "atime": "2"}][number % 3]
        elif which == 6:
            data = tar_bytes([(f"{i}.txt", rng.bytes(700)) for i in range(5)], tarfile.USTAR_FORMAT)
        elif which == 7:
            info.name = "same.txt"
        elif which == 8:
            info.name = f"a.__key__{rng.choice(['', '.b'])}"
        elif which == 9:
            info.name = f"{number}.f{int(rng.integers(100))}"
        elif which == 10:
            info.name = f"{number}.caf\udce9.TXT"
        else:
            info.type = tarfile.CONTTYPE
    info.size = len(data)
    with tarfile.open(fileobj=out, mode="w", format=format, errors="surrogateescape") as tar:
        try:
            tar.addfile(info, io.BytesIO(data))
        except ValueError:
            return b""  # ustar has no room for the name
        end = tar.offset
    raw = bytearray(out.getvalue()[:end])
    if kind < odd / 3:
        change(raw, int(rng.integers(10)))
    return bytes(raw)


def change(raw: bytearray, how: int) -> None:
    """The first header in another way, with a checksum that holds; or what an extended one says."""
    if how == 0:
        raw[124:136] = b"\x80" + (int(raw[124:135], 8)).to_bytes(11, "big")
    elif how == 1:
        raw[257:265] = bytes(8)  # v7
    elif how == 2:
        raw[156] = 0
    elif how == 3:
        raw[99] = ord("z")  # behind the name's end
    elif how == 4:
        raw[345:350] = b"12345"  # the name's beginning, except in GNU's headers
    elif raw[156] == ord("x"):
        start, text = ((514, b" path="), (514, b" size="), (513, b"\0"), (520, b" "), (512, b"99"))[how - 5]
        raw[start : start + len(text)] = text
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])


def in_runs(raw: bytes, last_dot: bool, pace: Pace, data: Any = None, ready: Ready = all_there) -> TarIndex:
    """What the format finds, at this pace."""
    whole = np.frombuffer(raw, np.uint8) if data is None else data
    samples, notes = TarSamples(last_dot=last_dot), TarNotes()
    for found in walk(whole.data, "u", notes, ready, RunFinder(whole, ready, samples.extend, pace)):
        samples.add(*found)
    return samples.index(notes.messages)


def one_by_one(raw: bytes, last_dot: bool) -> TarIndex:
    """What the walk from header to header finds."""
    samples, notes = TarSamples(last_dot=last_dot), TarNotes()
    for found in walk(memoryview(raw), "u", notes):
        samples.add(*found)
    return samples.index(notes.messages)


def told(make: Any, *args: Any) -> Any:
    try:
        found = make(*args)
    except FormatError as e:
        return str(e), e.offset, e.hint
    return {field.name: getattr(found, field.name) for field in fields(found)}


class Arriving:
    """A map that is zeros wherever nobody has waited."""

    def __init__(self, raw: bytes) -> None:
        self.whole = np.frombuffer(raw, np.uint8)
        self.data = np.zeros(len(raw), np.uint8)
        self.asked: list[tuple[int, int]] = []

    def ready(self, start: int, end: int) -> None:
        assert 0 <= start <= end <= len(self.whole)
        self.asked.append((start, end))
        self.data[start:end] = self.whole[start:end]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_runs_and_single_headers_tell_the_same(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32), label="seed"))
    format = data.draw(st.sampled_from(FORMATS))
    style = data.draw(st.integers(0, 3))
    times = data.draw(st.booleans())
    odd = data.draw(st.sampled_from([0, 0.02, 0.3]))
    count = data.draw(st.integers(1, 120))
    raw = bytearray(b"".join(entry(rng, i, format, style, odd, times) for i in range(count)))
    raw += bytes(data.draw(st.sampled_from([0, 512, 1024, 10240])))
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 3])) if raw else 0):
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    if data.draw(st.booleans()):
        del raw[int(rng.integers(len(raw) + 1)) :]
    last_dot = data.draw(st.booleans())
    pace = Pace(
        first=data.draw(st.sampled_from([1, 2, 16])),
        worth=data.draw(st.sampled_from([1, 64])),
        least=data.draw(st.sampled_from([1024, 8192, 1 << 16])),
        most=data.draw(st.sampled_from([4096, 1 << 20])),
    )
    whole = bytes(raw)
    wanted = told(one_by_one, whole, last_dot)
    arriving = Arriving(whole)
    assert told(in_runs, whole, last_dot, pace) == wanted
    assert told(in_runs, whole, last_dot, pace, arriving.data, arriving.ready) == wanted


@pytest.mark.parametrize("sizes", [[1000], [300, 1, 1900], [40_000]], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_windows_of_full_size(sizes: list[int], format: int) -> None:
    members = [(f"{i // 2:07}.{('txt', 'cls')[i % 2]}", b"x" * sizes[i % len(sizes)]) for i in range(4000)]
    raw = tar_bytes(members if sizes[0] < 9999 else members[:100], format)
    arriving = Arriving(raw)
    found = WebDataset().index(arriving.data, "u", arriving.ready)
    assert told(lambda: found) == told(one_by_one, raw, False)
    asked = len(arriving.asked)
    assert asked < 100 if sizes[0] < 9999 else asked > 100
    assert arriving.asked == sorted(arriving.asked), "front to back, as bytes arrive"


def timed(first: int, count: int, pax_headers: dict[str, str] | None = None) -> bytes:
    """Members of 700 bytes whose times are floats, without an end marker."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=pax_headers) as tar:
        for i in range(first, first + count):
            info = tarfile.TarInfo(f"{i // 2}.{('txt', 'cls')[i % 2]}")
            info.size, info.mtime = 700, 1.7e9 + (i + 1) / 7
            tar.addfile(info, io.BytesIO(bytes(700)))
        end = tar.offset
    return out.getvalue()[:end]


def test_times_of_change_do_not_slow_down() -> None:
    arriving = Arriving(timed(0, 4000) + bytes(10240))
    found = WebDataset().index(arriving.data, "u", arriving.ready)
    assert told(lambda: found) == told(one_by_one, arriving.whole.tobytes(), False)
    assert len(found) == 2000 and len(arriving.asked) < 100


@pytest.mark.parametrize("key", ["size", "comment", "GNU.sparse.major"])
def test_what_is_said_of_all_members_is_heeded(key: str) -> None:
    raw = timed(0, 40) + timed(40, 40, {key: "1000"}) + bytes(1024)
    assert told(in_runs, raw, False, Pace(first=2)) == told(one_by_one, raw, False)


@pytest.mark.parametrize(
    ("at", "text"),
    [(2, b" path="), (2, b" size="), (1, b"\0"), (8, b" "), (8, b"\0"), (0, b"29"), (0, b"99"), (0, b"27"), (27, b" ")],
)
@pytest.mark.parametrize("member", [30, 59])
def test_extended_headers_that_say_something_else(member: int, at: int, text: bytes) -> None:
    raw = bytearray(timed(0, 60) + bytes(1024))
    starts = [i for i in range(0, len(raw), 512) if raw[i + 156] == ord("x") and raw[i + 257 : i + 262] == b"ustar"]
    assert len(starts) == 60
    start = starts[member] + 512 + at
    raw[start : start + len(text)] = text
    assert told(in_runs, bytes(raw), False, Pace(first=2)) == told(one_by_one, bytes(raw), False)
