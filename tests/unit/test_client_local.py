"""Local paths: mapped in place, no daemon, no copy, typed one-line errors."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from cachefs.client import Client, ObjectStat, connect
from cachefs.config import Settings
from cachefs.errors import Changed, ConfigError, Denied, NearflashError, NotFound


@pytest.fixture
def client(tmp_path: Path) -> Client:
    settings = Settings(cache_dir=tmp_path / "cache", socket=tmp_path / "s.sock", autostart=False)
    return connect(settings)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "a b%20#?.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 1000)
    return path


def region_of(address: int) -> str:
    """The /proc/self/maps line that holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            return line
    raise AssertionError(f"{address:#x} is not mapped")


def test_view_lies_in_the_file_itself(client: Client, data: Path) -> None:
    with client.open(data) as shard:
        array = np.frombuffer(shard.view(), dtype=np.uint8)
    assert array.tobytes() == data.read_bytes()
    line = region_of(array.ctypes.data)
    assert line.endswith(str(data))
    assert line.split()[1] == "rw-p"


def test_writing_into_a_view_reaches_neither_file_nor_other_views(client: Client, data: Path) -> None:
    before = data.read_bytes()
    with client.open(str(data)) as shard:
        first, other = shard.view(), shard.view()
        first[:4] = b"XXXX"
        assert bytes(other[:4]) == before[:4]
        assert bytes(shard.view()[:4]) == before[:4]
    with client.open(data) as again:
        assert bytes(again.view()[:4]) == before[:4]
    assert bytes(first[:4]) == b"XXXX"
    assert data.read_bytes() == before


def test_the_map_goes_with_its_last_view_and_no_descriptor_stays(client: Client, data: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    shard = client.open(data)
    array = np.frombuffer(shard.view(), dtype=np.uint8)[5:9]
    shard.close()
    shard.close()
    address = array.ctypes.data
    assert array.tolist() == [5, 6, 7, 8]
    assert str(data) in region_of(address)
    del array
    assert str(data) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == count


def test_file_url_empty_file_and_fileno(client: Client, data: Path, tmp_path: Path) -> None:
    assert client.read(f"file://{data.parent}/a%20b%2520%23%3F.bin") == data.read_bytes()
    empty = tmp_path / "empty"
    empty.touch()
    with client.open(empty) as shard:
        assert (shard.size, len(shard.view())) == (0, 0)
        assert os.fstat(shard.fileno()).st_size == 0
    with pytest.raises(NearflashError, match="closed"):
        shard.fileno()


def test_wait_checks_its_range(client: Client, data: Path) -> None:
    with client.open(data) as shard:
        shard.wait(0, shard.size)
        with pytest.raises(ConfigError, match="not within"):
            shard.wait(0, shard.size + 1)


def test_errors_are_typed_and_name_the_path(client: Client, data: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"data: is a directory, not a file \(name a file in it\)"):
        client.open(data.parent)
    with pytest.raises(NotFound, match="absent: no such file"):
        client.open(tmp_path / "absent")
    with pytest.raises(NotFound, match="no such file"):
        client.list(tmp_path / "absent")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotFound, match="fifo: is not a regular file"):
        client.open(tmp_path / "fifo")
    with pytest.raises(Changed, match="no longer"):
        client.open(data, version="1-2-3")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_denied(client: Client, data: Path) -> None:
    data.chmod(0)
    with pytest.raises(Denied, match="may not read"):
        client.open(data)


def test_listing_is_sorted_follows_links_once_and_opens_again(client: Client, tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in ("b/2", "b/1", "a", "b-", "c/d/e"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    listed = client.list(root)
    assert [s.url for s in listed] == [f"{root}/{n}" for n in ("a", "b-", "b/1", "b/2", "c/d/e")]
    for item in listed:
        with client.open(item.url, version=item.version, size=item.size) as shard:
            assert bytes(shard.view()) == item.url.removeprefix(f"{root}/").encode()
    top = client.list(root, delimiter=True)
    assert [s.url.removeprefix(f"{root}/") for s in top if not s.is_prefix] == ["a", "b-"]
    assert [s.url.removeprefix(f"{root}/") for s in top if s.is_prefix] == ["b/", "c/", "loop/"]
    assert client.list(root / "a") == [client.stat(root / "a")]


def test_client_pickles_as_its_settings_and_prefetch_leaves_local_paths_alone(client: Client, data: Path) -> None:
    copy = pickle.loads(pickle.dumps(client))
    assert copy.settings == client.settings
    copy.prefetch([str(data), ObjectStat(str(data), 1, "v")])
    with copy:
        copy.close()
