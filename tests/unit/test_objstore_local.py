"""Local files as an object store: what is particular to a file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.errors import Changed, ConfigError, Denied, NotFound, StoreError
from cachefs.objstore import BlockingStore
from cachefs.objstore.replies import refusal_of_os_error


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with BlockingStore("file:///", Origin()) as opened:
        yield opened


def listed(store: BlockingStore, prefix: str) -> list[str]:
    return [meta.key for page in store.list(prefix) for meta in page.objects]


def test_a_folder_is_not_an_object(store: BlockingStore, tmp_path: Path) -> None:
    for call in (store.head, store.get, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFound, match="a directory, not a file"):
            call(str(tmp_path))
    with pytest.raises(NotFound):
        store.put(str(tmp_path), b"1")
    assert listed(store, str(tmp_path)) == []


def test_links_are_followed_and_circles_end(store: BlockingStore, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_bytes(b"12345")
    (tmp_path / "d/circle").symlink_to(tmp_path)
    (tmp_path / "d/gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(tmp_path / "d/file")
    os.mkfifo(tmp_path / "pipe")
    assert listed(store, f"{tmp_path}/") == [f"{tmp_path}/d/file", f"{tmp_path}/link"]
    assert bytes(store.get(f"{tmp_path}/link")[1]) == b"12345"
    for call in (store.head, store.get):
        with pytest.raises(NotFound, match="pipe, not a file"):
            call(f"{tmp_path}/pipe")


def test_what_a_dead_writer_left_is_not_listed(store: BlockingStore, tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"half"
        assert len(list(tmp_path.iterdir())) == 1
        assert listed(store, f"{tmp_path}/") == []
        raise LookupError("the source broke")

    with pytest.raises(LookupError):
        store.put_multipart(f"{tmp_path}/k", failing())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_create_that_lost(store: BlockingStore, tmp_path: Path) -> None:
    store.put(f"{tmp_path}/k", b"first", if_none_match=True)
    with pytest.raises(StoreError):
        store.put(f"{tmp_path}/k", b"second", if_none_match=True)
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    assert (tmp_path / "k").read_bytes() == b"first"
    assert (tmp_path / "k").stat().st_nlink == 1


def test_a_file_that_was_changed_in_place_is_noticed(store: BlockingStore, tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_bytes(b"12345")
    meta = store.head(str(path))
    os.utime(path, ns=(1, 1))
    with pytest.raises(Changed):
        store.get_range(str(path), 0, 2, version=meta)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do everything")
def test_without_rights(store: BlockingStore, tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"1")
    (tmp_path / "k").chmod(0)
    with pytest.raises(Denied):
        store.get(str(tmp_path / "k"))


@pytest.mark.parametrize("key", ["relative", "", "/a//b", "/a/../b", "/a/", "/a\0b"])
def test_what_is_no_path(store: BlockingStore, key: str) -> None:
    with pytest.raises(ConfigError, match="is no absolute"):
        store.head(key)
    with pytest.raises(ConfigError):
        list(store.list("relative/"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG])
def test_a_full_or_read_only_disk_is_not_tried_again(number: int) -> None:
    refusal = refusal_of_os_error(OSError(number, os.strerror(number)))
    assert refusal.status == 400 and refusal.code == errno.errorcode[number]
    assert refusal_of_os_error(OSError(errno.EIO, "I/O error")).cut
