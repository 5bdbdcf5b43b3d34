"""Where a data set is written to: what is there meanwhile, and after a failure or a kill at any moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loader
from cachefs.config import Origin
from cachefs.errors import DataError, FormatError
from loader.unfinished import UNFINISHED
from loader.writers import Output, open_output
from loader.writers.output import STAGE

OWN = r"\w\.bin|index\.json"


class Killed(BaseException):
    """The process ends here."""


class FakeStore:
    """The part of a store that an output uses, over a dict; ``watch`` sees each change beforehand."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.watch: Callable[[str], None] = lambda what: None

    def list(self, prefix: str) -> list[Any]:
        return [SimpleNamespace(objects=[SimpleNamespace(key=k) for k in sorted(self.objects) if k.startswith(prefix)])]

    def put(self, key: str, data: bytes) -> None:
        self.watch(f"put {key}")
        self.objects[key] = data

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.watch(f"delete {key}")
            del self.objects[key]

    def close(self) -> None:
        pass


OLD = {"out/index.json": b"old", "out/a.bin": b"old", "out/b.bin": b"old", "out/c.bin": b"old"}
NEW = {"out/a.bin": b"new", "out/b.bin": b"new", "out/index.json": b"new"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore(dict(OLD))
    monkeypatch.setattr("cachefs.objstore.blocking.BlockingStore", lambda *args: fake)
    return fake


def opened(url: str) -> Output:
    return open_output(url, own=OWN, force=True, origin=Origin())


def replace(url: str) -> None:
    with opened(url) as output:
        for name, data in NEW.items():
            output.put(name.removeprefix("out/"), data)
        output.commit()


class TestStore:
    def test_old_files_stay_until_there_is_a_new_one(self, store: FakeStore) -> None:
        with opened("s3://b/out") as output:
            assert store.objects == OLD
            with output.create("a.bin") as file:
                file.write(b"half")
        assert store.objects == OLD

    def test_what_is_new_replaces_all_that_is_old(self, store: FakeStore) -> None:
        replace("s3://b/out")
        assert store.objects == NEW

    def test_a_kill_at_any_moment_leaves_old_or_new_or_a_mark(self, store: FakeStore) -> None:
        steps = 0
        while True:
            store.objects, left = dict(OLD), [steps]

            def watch(what: str, left: list[int] = left) -> None:
                if not left[0]:
                    store.watch = dead
                    raise Killed(what)
                left[0] -= 1

            def dead(what: str) -> None:
                raise Killed("a dead process changes nothing")

            store.watch = watch
            try:
                replace("s3://b/out")
                break
            except Killed:
                pass
            assert store.objects in (OLD, NEW) or f"out/{UNFINISHED}" in store.objects
            store.watch = lambda what: None
            replace("s3://b/out")  # and the next one mends it
            assert store.objects == NEW
            steps += 1
        assert steps > 5

    def test_a_failure_leaves_no_half_that_looks_whole(self, store: FakeStore) -> None:
        with pytest.raises(DataError), opened("s3://b/out") as output:
            output.put("a.bin", b"new")
            raise DataError("the source is damaged")
        assert f"out/{UNFINISHED}" in store.objects and "out/index.json" not in store.objects
        store.objects = {}
        with pytest.raises(DataError), opened("s3://b/out") as output:
            output.put("a.bin", b"new")
            raise DataError("the source is damaged")
        assert store.objects == {}


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "out").mkdir()
        for name, data in OLD.items():
            (tmp_path / name).write_bytes(data)
        return tmp_path / "out"

    def seen(self, folder: Path) -> dict[str, bytes]:
        return {f"out/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def test_a_kill_at_any_moment_leaves_old_or_new_or_a_mark(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        change = {name: getattr(Path, name) for name in ("touch", "unlink", "rename")}
        stop = 0
        for stop in range(100):
            steps = [0]

            def counted(name: str, steps: list[int] = steps, stop: int = stop) -> Callable[..., Any]:
                def step(path: Path, *args: Any, **options: Any) -> Any:
                    steps[0] += 1
                    if steps[0] > stop:
                        raise Killed(name)
                    return change[name](path, *args, **options)

                return step

            with monkeypatch.context() as patch:
                for name in change:
                    patch.setattr(Path, name, counted(name))
                try:
                    replace(str(folder))
                    break
                except Killed:
                    pass
            found = self.seen(folder)
            assert found in (OLD, NEW) or f"out/{UNFINISHED}" in found
            if f"out/{UNFINISHED}" in found:
                for source in (folder, folder / "*.bin"):
                    with pytest.raises(FormatError, match="not finished"):
                        loader.ShardDataset(source, batch_size=1, format="files").manifest  # noqa: B018
            replace(str(folder))
            assert self.seen(folder) == NEW and not (folder / STAGE).exists()
            for name, data in OLD.items():
                (folder.parent / name).write_bytes(data)
        assert 5 < stop < 99
