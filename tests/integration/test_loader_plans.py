"""A data set declares by itself what it will read: an epoch after the other, from a cache that holds a quarter."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cachefs.client import Client, connect
from cachefs.shard import ObjectStat
from cachefs.testing.enginebox import CHUNK
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served
from loader import Mixture, ShardDataset
from loader.formats import Tokens
from loader.planahead import PlanNames
from loader.testing import write_tars

SHARDS, WINDOWS = 24, 128
LENGTH = CHUNK // WINDOWS  # uint16, so that a shard has two chunks


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


@pytest.fixture
def store() -> ScriptedStore:
    rng = np.random.default_rng(1)
    shards = rng.integers(0, 2**16, (SHARDS, WINDOWS * LENGTH), dtype=np.uint16)
    return ScriptedStore({f"tokens/{i:02d}.bin": shard.tobytes() for i, shard in enumerate(shards)})


@pytest.fixture
def server(tmp_path: Path, store: ScriptedStore) -> Iterator[Served]:
    with served(tmp_path, store, quota=SHARDS * 2 * CHUNK // 4 + 4 * CHUNK) as running:
        yield running


def forget(server: Served) -> None:
    """As another daemon knows nothing of the plans there are."""
    for session in list(server.control.sessions._sessions):
        server.box.engine.plans.leave(session)


def dataset(client: Client, **options: Any) -> ShardDataset:
    format = Tokens(length=LENGTH, dtype="uint16")
    return ShardDataset(
        "s3://bucket/tokens/", batch_size=16, lanes=1, block_shards=1, seed=3, format=format, client=client, **options
    )


def rows(dataset: ShardDataset) -> list[bytes]:
    return [bytes(np.asarray(sample["tokens"]).astype(np.uint16)) for sample in dataset]


class OldClient(Client):
    """Of a daemon that takes no plans."""

    def plan(self, *args: Any, **options: Any) -> bool:
        return False


def keys(samples: Iterable[Any]) -> list[bytes]:
    return [bytes(sample["bin"][:12]) for sample in samples]


def test_epochs_are_the_same_with_plans_and_cost_less(tmp_path: Path) -> None:
    """A cache for a quarter of the shards, from the second epoch on (in the first one they are counted)."""
    write_tars(tmp_path / "tars", [8] * SHARDS, payload=CHUNK // 2)
    tars = {f"tars/{path.name}": path.read_bytes() for path in sorted((tmp_path / "tars").iterdir())}
    size = len(tars["tars/000.tar"])
    fetched: dict[type[Client], float] = {}
    got: dict[type[Client], list[list[bytes]]] = {}
    for kind in (Client, OldClient):
        store = ScriptedStore(tars)
        folder = tmp_path / kind.__name__
        folder.mkdir()
        with served(folder, store, quota=size * SHARDS // 4) as server, kind(server.settings) as client:
            data = ShardDataset("s3://bucket/tars/", batch_size=8, lanes=1, block_shards=1, seed=3, client=client)
            first = keys(data)
            before = sum(call.end - call.start for call in store.calls)
            got[kind] = [first, *(keys(data) for _ in range(3))]
            fetched[kind] = (sum(call.end - call.start for call in store.calls) - before) / size
            told = ", paused" if kind is Client else ""
            until(lambda client=client, told=told: str(client.stats()["plan_progress"])[-8:] == told)  # type: ignore[misc]
            assert client.stats()["plans"] == int(kind is Client), "each pass takes the place of the one before"
    assert got[Client] == got[OldClient]
    assert fetched[Client] < 3 * SHARDS, "what the next epoch needs first is kept"
    assert fetched[Client] < fetched[OldClient]


def test_the_daemon_is_told_how_far_reading_is(server: Served) -> None:
    with connect(server.settings) as client:
        samples = iter(dataset(client))
        for _ in range(3 * WINDOWS):
            next(samples)
        shown = str(client.stats()["plan_progress"])
        position, _, end = shown.rpartition(": ")[2].partition(" of ")
        assert 2 * WINDOWS - 16 <= int(position) <= 3 * WINDOWS + 16
        assert int(end) == 2 * SHARDS * WINDOWS, "this epoch and the next"
        samples.close()  # type: ignore[attr-defined]


def test_workers_share_one_plan(server: Served) -> None:
    with connect(server.settings) as client:
        both = DataLoader(dataset(client), batch_size=16, num_workers=2)
        batches = iter(both)
        for _ in range(8):
            next(batches)
        assert client.stats()["plans"] == 1
        del batches
        until(lambda: client.stats()["plans"] == 0)


def test_a_data_set_that_is_counted_while_it_is_read_is_planned_from_then_on(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars", [5] * 6)
    store = ScriptedStore({f"tars/{p.name}": p.read_bytes() for p in sorted((tmp_path / "tars").glob("*.tar"))})
    with served(tmp_path, store) as server, connect(server.settings) as client:
        progressive = ShardDataset("s3://bucket/tars/", batch_size=5, seed=1, client=client)
        first = [bytes(sample["bin"]) for sample in progressive]
        assert client.stats()["plans"] == 1
        assert sorted(bytes(sample["bin"]) for sample in progressive) == sorted(first)
        assert client.stats()["plans"] == 1


def test_another_daemon_is_told_anew(server: Served) -> None:
    """One that knows nothing of the plan, as after a restart."""
    with connect(server.settings) as client:
        samples = iter(dataset(client))
        for _ in range(WINDOWS):
            next(samples)
        server.call(lambda: forget(server))
        assert client.stats()["plans"] == 0
        for _ in range(3 * WINDOWS):
            next(samples)
        assert client.stats()["plans"] == 1
        samples.close()  # type: ignore[attr-defined]


def test_processes_share_a_plan_at_another_daemon_too(server: Served) -> None:
    """They are at different positions when it is told anew."""
    with connect(server.settings) as first, connect(server.settings) as second, connect(server.settings) as watcher:
        passes = [iter(dataset(client)) for client in (first, second)]
        for samples, count in zip(passes, (3 * WINDOWS, 2 * WINDOWS), strict=True):
            for _ in range(count):
                next(samples)
        assert watcher.stats()["plans"] == 1
        server.call(lambda: forget(server))
        for samples in passes:
            for _ in range(2 * WINDOWS):
                next(samples)
        assert watcher.stats()["plans"] == 1
        for samples in passes:
            samples.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", ["declare", "progress"])
def test_a_daemon_with_a_defect_in_its_plans_is_read_from(
    server: Served, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(server.box.engine.plans, call, defect)
    with connect(server.settings) as client:
        samples = iter(dataset(client))
        assert len([next(samples) for _ in range(3 * WINDOWS)]) == 3 * WINDOWS
        samples.close()  # type: ignore[attr-defined]
    assert [record.name for record in caplog.records if "was not told" in record.getMessage()] == ["loader"]


def test_without_plans_the_samples_are_the_same(server: Served) -> None:
    got = []
    with connect(server.settings) as watcher:
        for plans in ("on", "off"):
            with connect(server.settings, plans=plans) as client:
                samples = iter(dataset(client))
                got.append([next(samples)["tokens"].tobytes() for _ in range(4 * WINDOWS)])
                assert client.stats()["plans"] == (1 if plans == "on" else 0)
                samples.close()  # type: ignore[attr-defined]
            until(lambda: watcher.stats()["plans"] == 0)
    assert got[0] == got[1]


def test_a_plan_of_a_mixture_rests_and_ends_with_it(server: Served) -> None:
    with connect(server.settings) as client:
        mixture = Mixture({"a": dataset(client)}, batch_size=16)
        samples = iter(mixture)
        next(samples)
        assert ", paused" not in str(client.stats()["plan_progress"])
        samples.close()  # type: ignore[attr-defined]
        until(lambda: str(client.stats()["plan_progress"]).endswith(", paused"))
        del samples, mixture
        until(lambda: gc.collect() >= 0 and client.stats()["plans"] == 0)


def test_passes_one_after_the_other_have_one_name() -> None:
    names = PlanNames()
    assert [names.take(), names.take()] == [0, 1]
    names.give_back(0)
    assert [names.take(), names.take()] == [0, 2]
    assert names.of(0) != names.of(1) != PlanNames().of(1)


def test_what_is_asked_for_without_plans_comes_in_order(server: Served) -> None:
    asked: list[str] = []

    class Watched(OldClient):
        def prefetch(self, urls: Any) -> None:
            asked.extend(stat.url for stat in urls if isinstance(stat, ObjectStat))
            super().prefetch(urls)

    with Watched(server.settings) as client:
        samples = iter(dataset(client))
        next(samples)
        assert len(asked) == len(set(asked)) >= 16
        samples.close()  # type: ignore[attr-defined]


def test_token_files_are_not_held_beyond_their_use(server: Served) -> None:
    """What a pass maps of a cache for a quarter of the shards: the others' space is the plan's to use."""
    with connect(server.settings) as client:
        tokens = dataset(client)
        for _ in range(2):
            assert sum(len(batch["tokens"]) for batch in tokens.batched()) == SHARDS * WINDOWS
            kept = tokens._definition._rows
            assert kept is not None and not kept[2]._open, "nothing between passes"
            assert len(kept[2]._free) == 2, "those of two blocks while it reads"
        until(lambda: client.evict(None).busy == 0)


def test_token_files_stay_placed_where_the_cache_can_spare_them(tmp_path: Path, store: ScriptedStore) -> None:
    with served(tmp_path, store, quota=SHARDS * 2 * CHUNK * 17) as server, connect(server.settings) as client:
        tokens = dataset(client)
        for _ in range(2):
            assert sum(len(batch["tokens"]) for batch in tokens.batched()) == SHARDS * WINDOWS
            kept = tokens._definition._rows
            assert kept is not None and len(kept[2]._open) == SHARDS
