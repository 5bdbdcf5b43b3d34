"""The work of ``check``: shards are read by several threads, each shard by one of them."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cachefs.errors import Changed, Corrupt, DataError, NearflashError, NotFound

from ..formats.listing import INDEX
from ..layouts.mds_index import hashes, mismatch, read_mds_index
from ..opening import ClientObjects

if TYPE_CHECKING:
    from cachefs.client import ObjectStat

    from .dataset import DataSet, Reader

_MOST_WORKERS = 16
_FOUND = (DataError, Corrupt, Changed, NotFound)
"""What says that the data is wrong. Any other error (no answer, no right) says nothing about it, and ends the check."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong. ``sample``: its number in its shard (or part); ``None``: all of the shard."""

    url: str
    what: str
    part: int | None = None
    sample: int | None = None
    offset: int | None = None
    error: str = "FormatError"

    @classmethod
    def of(cls, error: NearflashError, url: str, part: int | None = None, sample: int | None = None) -> Damage:
        what = error.what + (f" ({error.hint})" if error.hint else "")
        return cls(error.url or url, what, part, sample, error.offset, type(error).__name__)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        part = "" if self.part is None else f" part {self.part}"
        sample = "" if self.sample is None else f" sample {self.sample}"
        offset = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.url}{part}{sample}{offset}: {self.what}"


@dataclass
class Report:
    """What was read, and all that is wrong with it, in the order of shards and samples."""

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    value_bytes: int = 0
    digests: int = 0
    skipped: int = 0
    damages: list[Damage] = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        """Everything but the damages themselves, which are counted."""
        names = ("shards", "samples", "bytes", "value_bytes", "digests", "skipped")
        return {**{name: getattr(self, name) for name in names}, "damaged": len(self.damages)}

    def add(self, other: Report) -> None:
        for name in ("shards", "samples", "bytes", "value_bytes", "digests", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.damages += other.damages


def check_all(data: DataSet, reader: Reader, *, workers: int | None, advance: Callable[[int], None]) -> Report:
    """Read everything. Raises what the origin or the cache raises; damage is reported."""
    count = min(workers or min(os.cpu_count() or 1, _MOST_WORKERS), len(data.stats))
    stop = threading.Event()
    done: dict[int, Report] = {}
    digests = _digests(data)

    def work(number: int) -> Report:
        report = _check_shard(data, reader, number, digests, stop)
        advance(data.stats[number].size)
        return report

    numbers = iter(range(len(data.stats)))
    running: dict[Future[Report], int] = {}
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="check")
    try:
        while True:
            while len(running) < 2 * count and (number := next(numbers, None)) is not None:
                data.prefetch(number)
                running[pool.submit(work, number)] = number
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done[running.pop(future)] = future.result()
    finally:
        stop.set()  # after Ctrl-C no thread reads a shard to its end
        pool.shutdown(cancel_futures=True)
    total = Report()
    for number in sorted(done):
        total.add(done[number])
    return total


def _check_shard(
    data: DataSet, reader: Reader, number: int, digests: dict[str, dict[str, str]], stop: threading.Event
) -> Report:
    stat = data.stats[number]
    report = Report(shards=1, bytes=stat.size)
    try:
        if stat.url in digests:
            _compare(data, stat, digests[stat.url], report)
        parts = data.parts(number)
    except _FOUND as e:
        report.damages.append(Damage.of(e, stat.url))
        return report
    whole = True
    for part in parts:
        try:
            shard = data.open(number, part)
        except _FOUND as e:
            report.damages.append(Damage.of(e, stat.url, part))
            whole = False
            continue
        try:
            report.skipped += shard.index.skipped
            for i in range(len(shard.index)):
                if stop.is_set():
                    return report
                try:
                    sample = reader(shard, i)
                    report.value_bytes += sum(map(touch, sample.values()))
                except _FOUND as e:
                    report.damages.append(Damage.of(e, stat.url, part, i))
                report.samples += 1
        finally:
            shard.close()
    if whole and data.counts is not None and report.samples != data.counts[number]:
        what = f"holds {report.samples} samples, the index beside it says {data.counts[number]}"
        report.damages.append(Damage(stat.url, what))
    return report


def touch(value: Any) -> int:
    """Read every byte of a value; returns how many there are."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        whole = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        zlib.adler32(whole.view(np.uint8).data if whole.ndim and whole.size else whole.tobytes())
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(touch, value))
    if isinstance(value, dict):
        return sum(map(touch, value.values()))
    return len(value) if isinstance(value, str | bytes) else 0


def _digests(data: DataSet) -> dict[str, dict[str, str]]:
    """The digests that MDS indexes beside the shards give them, by the shards' URLs."""
    if data.format.name != "mds":
        return {}
    found: dict[str, dict[str, str]] = {}
    for folder, index in _indexes(data):
        found |= {f"{folder}/{name}": digests for name, digests in hashes(index, folder).items()}
    return found


def _indexes(data: DataSet) -> Iterator[tuple[str, bytes]]:
    for folder in dict.fromkeys(stat.url.rpartition("/")[0] for stat in data.stats):
        url = f"{folder}/{INDEX}"
        try:
            raw = data.client.read(url)
        except NotFound:
            continue
        if read_mds_index(raw, url, optional=True) is not None:
            yield folder, raw


def _compare(data: DataSet, stat: ObjectStat, wanted: dict[str, str], report: Report) -> None:
    objects = ClientObjects(data.client, {stat.url: (stat.version, stat.size)}, whole=True)
    try:
        name = mismatch(objects.map(stat.url).data, wanted)
    finally:
        objects.close()
    report.digests += 1
    if name is not None:
        report.damages.append(Damage(stat.url, f"its bytes do not have the {name} that the index beside it gives"))
