"""Every format on shards that are mapped before their bytes have come: nothing is looked at that was not asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.client import connect
from cachefs.errors import NearflashError
from cachefs.shard import ObjectStat
from loader.formats import Format
from loader.formats.abc import Mapped
from loader.opening import ClientObjects, open_mapped
from loader.sources import find_shards
from tests.fault.format_damage import digest

DATA = Path(__file__).parent / "data"
HEADERLESS = loader.formats.Tokens(length=64)


class Arriving:
    """Objects whose maps hold zeros wherever nobody has waited; every byte is fetched when it is asked for."""

    def __init__(self) -> None:
        self.inner = ClientObjects(connect(), {}, whole=True)

    def map(self, url: str, stat: ObjectStat | None = None) -> Mapped:
        whole = self.inner.map(url, stat).data
        data = np.zeros(len(whole), np.uint8)

        def ready(start: int, end: int) -> None:
            assert 0 <= start <= end <= len(whole)
            data[start:end] = whole[start:end]

        return Mapped(data, ready)

    def bound(self, url: str) -> tuple[str, int] | None:
        return self.inner.bound(url)

    def ask(self, stats: Sequence[ObjectStat]) -> None:
        self.inner.ask(stats)

    def recalled(self, url: str, name: str, make: Callable[[], Any]) -> Any:
        return self.inner.recalled(url, name, make)

    def read(self, url: str) -> bytes:
        return self.inner.read(url)

    def stat(self, url: str) -> ObjectStat:
        return self.inner.stat(url)

    def list(self, folder: str) -> Sequence[ObjectStat]:
        return self.inner.list(folder)

    def kept(self, url: str, name: str) -> bytes | None:
        return None

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        pass

    def close(self) -> None:
        self.inner.close()


def shards() -> list[tuple[str, Format | None]]:
    """One shard of each data set that other tools wrote, and its format as the data set's layout tells it."""
    found: list[tuple[str, Format | None]] = []
    client = connect()
    for source in sorted(path for path in DATA.glob("*/*") if path.parent.name != "expect"):
        headerless = source.name in ("nanogpt_train.bin", "olmo_part-0-00000.npy")
        try:
            listed = find_shards(source, client, None)
        except NearflashError:
            continue  # an empty file, or a table that lies beside others
        for stat in listed.stats[:2]:
            if stat.size:
                found.append((stat.url, HEADERLESS if headerless else listed.format))
    return found


def samples(shard: Any) -> list[Any]:
    return [digest(shard.read(i)) for i in range(len(shard.index))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("url", "format"), shards(), ids=lambda value: Path(value).name if isinstance(value, str) else ""
)
def test_bytes_are_waited_for_before_they_are_read(url: str, format: Format | None) -> None:
    client = connect()
    try:
        complete = open_mapped(client, url, format)
    except NearflashError as e:
        pytest.skip(f"not a shard: {e}")
    objects = Arriving()
    arriving = complete.format.open(objects, url)
    shard = replace(complete, source=arriving.source, index=arriving.index, objects=objects.inner)
    assert samples(shard) == samples(complete)
    parts = complete.format.parts(Arriving(), url)
    if parts is not None:
        assert sum(parts) == len(complete.index)
        for part, count in enumerate(parts):
            opened = complete.format.open(objects, url, part=part)
            assert len(opened.index) == count
            rows = [digest(complete.format.read(opened.source, opened.index, i, url)) for i in range(count)]
            before = sum(parts[:part])
            assert rows == samples(complete)[before : before + count]
