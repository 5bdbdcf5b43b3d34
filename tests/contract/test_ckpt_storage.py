"""What every place for checkpoints does: a folder, the model object store, and a real S3 server."""

from __future__ import annotations

import array
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachefs.errors import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    NotFound,
)
from cachefs.objstore.blocking import BlockingStore
from cachefs.objstore.url import parse_url
from ckptstore.claims import Claim, claim_generation, create_record
from ckptstore.commit import begin_step
from ckptstore.layout import StepRef, part_name, segment_name
from ckptstore.manifest import FileRef
from ckptstore.storage import Storage, open_storage
from ckptstore.storage_object import ObjectStorage
from ckptstore.testing.model import ModelStore
from ckptstore.testing.saving import require_sound, root_of, save_step, write_node
from ckptstore.timeline import committed_steps, find_step, latest_ref, read_timeline
from ckptstore.verify import read_parts, read_root, verify_step

if TYPE_CHECKING:
    from cachefs.testing.seaweed import SeaweedServer

SEGMENT = segment_name("a", 0, 0)
Open = Callable[[], Storage]

PLACES = ["folder", "model", pytest.param("s3", marks=pytest.mark.s3)]
PREFIX = "run[1]/a+b c/%41/é"
NUMBERS = itertools.count()


@pytest.fixture(params=PLACES)
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """A function that opens the same, at first absent, store each time it is called."""
    opened: list[Storage] = []
    if request.param == "folder":
        root = tmp_path / PREFIX

        def make() -> Storage:
            return open_storage(root)
    elif request.param == "model":
        model = ModelStore()

        def make() -> Storage:
            return model.storage(url=f"memory://model/{PREFIX}")
    else:
        server: SeaweedServer = request.getfixturevalue("seaweed")
        bucket = server.make_bucket("ckpt.contract")  # one for all tests: making one takes seconds
        prefix = f"{next(NUMBERS)}/{PREFIX}"

        def make() -> Storage:
            return open_storage(f"s3://{bucket}/{prefix}", server.origin)

    def tracked() -> Storage:
        opened.append(make())
        return opened[-1]

    yield tracked
    for storage in opened:
        storage.close()


@pytest.fixture
def storage(reopen: Open) -> Storage:
    return reopen()


@pytest.fixture
def claim(storage: Storage) -> Claim:
    return claim_generation(storage, "a")


# --- names and bytes ------------------------------------------------------------------------------------------------


def test_a_root_that_is_not_there_is_empty_and_stays_absent(storage: Storage) -> None:
    assert not storage.exists()
    assert storage.list() == []
    assert storage.list("generations/") == []
    assert storage.folders() == []
    assert latest_ref(storage) is None
    assert committed_steps(storage) == []
    with pytest.raises(CheckpointNotFound, match="no step 5"):
        find_step(storage, 5)
    with pytest.raises(CheckpointNotFound):
        verify_step(storage, StepRef(5, 1))
    assert not storage.exists()


def test_a_record_is_created_once(storage: Storage) -> None:
    assert storage.create("generations/000001.json", b"first")
    assert not storage.create("generations/000001.json", b"second")
    assert storage.read("generations/000001.json") == b"first"
    assert storage.exists()
    assert [(info.name, info.size) for info in storage.list()] == [("generations/000001.json", 5)]


def test_of_many_that_create_one_record_at_once_one_succeeds(storage: Storage) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> tuple[bool, bytes]:
        start.wait(30)
        data = b"%d" % number
        return storage.create("generations/000007.json", data), data

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(8)))
    winners = [data for won, data in results if won]
    assert winners == [storage.read("generations/000007.json")]


def test_everyone_who_creates_a_record_learns_whose_it_is(storage: Storage) -> None:
    start = threading.Barrier(4)

    def create(number: int) -> bytes:
        start.wait(30)
        return create_record(storage, "generations/000007.json", b"%d" % number)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(create, range(4)))) == 1


def test_ranges_are_read_exactly(storage: Storage) -> None:
    data = bytes(range(256)) * 40
    storage.create("generations/000001.json", data)
    name = "generations/000001.json"
    assert bytes(storage.read_range(name, 0, len(data))) == data
    assert bytes(storage.read_range(name, 100, 300)) == data[100:300]
    assert bytes(storage.read_range(name, 7, 7)) == b""
    target = array.array("H", bytes(200))
    storage.read_into(name, 256, memoryview(target))
    assert target.tobytes() == data[256:456]
    storage.read_into(name, 0, memoryview(b""))
    assert storage.size(name) == len(data)


def test_a_range_beyond_the_end_is_damage_that_names_the_file(storage: Storage) -> None:
    storage.create("generations/000001.json", b"0123456789")
    with pytest.raises(CheckpointDamaged, match=r"generations/000001\.json at byte 5"):
        storage.read_range("generations/000001.json", 5, 11)
    with pytest.raises(CheckpointDamaged, match=r"generations/000001\.json"):
        storage.read_into("generations/000001.json", 5, memoryview(bytearray(6)))


def test_what_is_missing_is_named(storage: Storage) -> None:
    for act in (
        lambda: storage.read("step-1/x"),
        lambda: storage.read_range("step-1/x", 0, 1),
        lambda: storage.read_into("step-1/x", 0, memoryview(bytearray(1))),
        lambda: storage.size("step-1/x"),
    ):
        with pytest.raises(NotFound, match=r"step-1/x: ") as caught:
            act()
        assert "é" in str(caught.value)


@pytest.mark.parametrize("name", ["", "/x", "x/", "a//b", "../x", "a/../../x", "./x", "a\0b", "a\\b"])
def test_no_name_leads_out_of_the_root(storage: Storage, name: str) -> None:
    with pytest.raises(ConfigError, match="no name in a checkpoint store"):
        storage.read(name)
    with pytest.raises(ConfigError):
        storage.create(name, b"")


def test_a_listing_is_sorted_and_folders_are_one_level(storage: Storage) -> None:
    names = ["step-b/2", "step-b/1", "step-a/1", "generations/000001.json", "step-b.x/1"]
    for name in names:
        storage.create(name, name.encode())
    assert [info.name for info in storage.list()] == sorted(names)
    assert [info.name for info in storage.list("step-b/")] == ["step-b/1", "step-b/2"]
    assert [info.name for info in storage.list("step-b")] == ["step-b.x/1", "step-b/1", "step-b/2"]
    assert storage.folders() == ["generations", "step-a", "step-b", "step-b.x"]


# --- saving ---------------------------------------------------------------------------------------------------------


def test_a_saved_step_is_found_read_and_verified_by_another_client(
    storage: Storage, claim: Claim, reopen: Open
) -> None:
    save_step(storage, claim, 100, nodes=3)
    other = reopen()
    assert latest_ref(other) == StepRef(100, 1)
    require_sound(other, StepRef(100, 1))
    root = read_root(other, StepRef(100, 1))
    assert [part.node for part in read_parts(other, root)] == [0, 1, 2]
    assert other.folders() == ["generations", StepRef(100, 1).folder]
    assert {info.name.partition("/")[2] for info in other.list(f"{StepRef(100, 1).folder}/")} == {
        "manifest.json",
        *(part_name("a", node) for node in range(3)),
        *(segment_name("a", node, 0) for node in range(3)),
    }


def test_nothing_is_a_checkpoint_before_its_manifest(storage: Storage, claim: Claim, reopen: Open) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(writer, 0, [b"x" * 100])
    other = reopen()
    assert latest_ref(other) is None
    assert committed_steps(other) == []
    writer.commit(root_of(writer, [node]), node.files)
    assert committed_steps(other) == [StepRef(10, 1)]


def test_several_processes_write_one_step(storage: Storage, claim: Claim, reopen: Open) -> None:
    writers = [begin_step(reopen(), 10, claim.generation, claim.attempt) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        nodes = list(pool.map(lambda n: write_node(writers[n], n, [b"%d" % n, b"more"]), range(4)))
    writers[2].commit(root_of(writers[2], nodes), [file for node in nodes for file in node.files])
    require_sound(storage, StepRef(10, 1))
    assert len(verify_step(storage, StepRef(10, 1))) == 0


def test_buffers_of_any_kind_are_written_as_their_bytes(storage: Storage, claim: Claim) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    floats = memoryview(array.array("d", [1.5, 2.5]))
    buffers = [b"", bytearray(b"abc"), floats, memoryview(b"").cast("B"), *(bytes([i % 251]) for i in range(2000))]
    expected = b"abc" + floats.tobytes() + bytes(i % 251 for i in range(2000))
    assert writer.write(SEGMENT, iter(buffers)) == len(expected)
    node = write_node(writer, 1, [b""])
    writer.commit(root_of(writer, [node]), [FileRef(SEGMENT, len(expected)), *node.files])
    assert storage.read(f"{writer.ref.folder}/{SEGMENT}") == expected
    assert storage.size(f"{writer.ref.folder}/{segment_name('a', 1, 0)}") == 0


def test_a_buffer_that_is_not_contiguous_is_refused(storage: Storage, claim: Claim) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    with pytest.raises(ConfigError, match="not contiguous"):
        writer.write(SEGMENT, [memoryview(b"0123456789")[::2]])


def test_a_file_larger_than_one_request(storage: Storage, claim: Claim) -> None:
    if isinstance(storage, ObjectStorage):
        storage.part_bytes = 5 << 20
    pieces = [os.urandom(3 << 20) for _ in range(4)] + [b"tail"]
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    assert writer.write(SEGMENT, pieces) == (12 << 20) + 4
    whole = b"".join(pieces)
    node = write_node(writer, 1, [b"x"])
    writer.commit(root_of(writer, [node]), [FileRef(SEGMENT, len(whole)), *node.files])
    assert storage.read(f"{writer.ref.folder}/{SEGMENT}") == whole


@pytest.mark.parametrize("size", [4, 6, None])
def test_a_file_that_is_missing_or_of_another_size_stops_the_commit(
    storage: Storage, claim: Claim, size: int | None
) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(writer, 0, [b"12345"])
    name = node.files[0].name if size else segment_name("a", 7, 0)
    with pytest.raises(CheckpointError, match=f"{name} (is missing|has 5 bytes)"):
        writer.commit(root_of(writer, [node]), [FileRef(name, size or 5)])
    assert not writer.manifest_sent
    assert latest_ref(storage) is None


def test_a_step_is_committed_once_in_a_generation(storage: Storage, claim: Claim) -> None:
    save_step(storage, claim, 10, salt="first")
    before = {info.name: storage.read(info.name) for info in storage.list(StepRef(10, 1).folder)}
    with pytest.raises(CheckpointConflict, match="committed already, by attempt 'a'"):
        save_step(storage, claim, 10, salt="other")
    assert {info.name: storage.read(info.name) for info in storage.list(StepRef(10, 1).folder)} == before


def test_a_second_save_that_began_before_the_first_was_committed_overwrites_nothing(
    storage: Storage, claim: Claim
) -> None:
    writers = [begin_step(storage, 10, claim.generation, claim.attempt) for _ in range(2)]
    first = write_node(writers[0], 0, [b"first"])
    with pytest.raises(CheckpointConflict, match="was written before"):
        write_node(writers[1], 0, [b"other"])
    writers[0].commit(root_of(writers[0], [first]), first.files)
    assert writers[1].abort() == []
    require_sound(storage, StepRef(10, 1))


def test_a_generation_that_is_not_ones_own_cannot_be_committed_to(storage: Storage, claim: Claim) -> None:
    for generation, owner in ((1, "attempt 'a'"), (2, "nobody")):
        writer = begin_step(storage, 10, generation, "b")
        node = write_node(writer, 0, [b"x"])
        with pytest.raises(CheckpointConflict, match=f"belongs to {owner}, not to attempt 'b'"):
            writer.commit(root_of(writer, [node]), node.files)
        assert writer.abort(manifest_sent=False) == []


def test_a_root_of_another_step_is_refused(storage: Storage, claim: Claim) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    other = begin_step(storage, 11, claim.generation, claim.attempt)
    node = write_node(writer, 0, [b"x"])
    with pytest.raises(ConfigError, match="the manifest is of step 11"):
        writer.commit(root_of(other, [node]), node.files)


def test_a_newer_claim_stops_the_older_attempt(storage: Storage, claim: Claim, reopen: Open) -> None:
    save_step(storage, claim, 10)
    other = reopen()
    newer = claim_generation(other, "b")
    assert newer == Claim(2, "b", 1, 10)
    with pytest.raises(CheckpointConflict, match="generation 1 has lost the store to generation 2"):
        save_step(storage, claim, 20)
    save_step(other, newer, 20)
    assert read_timeline(storage).live == (StepRef(20, 2), StepRef(10, 1))


def test_an_abort_removes_what_was_written_and_the_step_can_be_saved_again(
    storage: Storage, claim: Claim, reopen: Open
) -> None:
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    write_node(writer, 0, [b"x"])
    assert writer.abort(manifest_sent=False) == []
    assert writer.abort(manifest_sent=False) == []
    assert [info.name for info in storage.list()] == ["generations/000001.json", "generations/000001.start.json"]
    save_step(storage, claim, 10, salt="again")
    require_sound(reopen(), StepRef(10, 1))


def test_an_abort_by_a_rank_that_does_not_know_leaves_no_way_to_a_gutted_step(
    storage: Storage, claim: Claim, reopen: Open
) -> None:
    coordinator = begin_step(storage, 10, claim.generation, claim.attempt)
    follower = begin_step(reopen(), 10, claim.generation, claim.attempt)
    nodes = [write_node(coordinator, 0, [b"x"]), write_node(follower, 1, [b"y"])]
    assert follower.abort() == []
    with pytest.raises(CheckpointError):
        coordinator.commit(root_of(coordinator, nodes), [file for node in nodes for file in node.files])
    assert coordinator.abort() == []
    assert latest_ref(storage) is None
    save_step(storage, claim, 20)
    assert committed_steps(storage) == [StepRef(20, 1)]


def test_an_abort_after_the_commit_touches_nothing(storage: Storage, claim: Claim, reopen: Open) -> None:
    coordinator = begin_step(storage, 10, claim.generation, claim.attempt)
    follower = begin_step(reopen(), 10, claim.generation, claim.attempt)
    nodes = [write_node(coordinator, 0, [b"x"]), write_node(follower, 1, [b"y"])]
    coordinator.commit(root_of(coordinator, nodes), [file for node in nodes for file in node.files])
    assert follower.abort() == []
    assert coordinator.abort() == []
    assert latest_ref(storage) == StepRef(10, 1)
    require_sound(storage, StepRef(10, 1))


def test_files_of_dead_attempts_are_ignored(storage: Storage, claim: Claim, reopen: Open) -> None:
    for step in (10, 20):
        write_node(begin_step(storage, step, claim.generation, claim.attempt), 0, [b"dead"])
    other = reopen()
    newer = claim_generation(other, "b")
    save_step(other, newer, 10)
    assert committed_steps(other) == [StepRef(10, 2)]
    assert read_timeline(other).others == ()
    require_sound(other, StepRef(10, 2))


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix, folder",
    [
        ("", ""),
        ("run", "run/"),
        ("run/", "run/"),
        ("run//", "run//"),
        ("/run", "/run/"),
        ("a//b", "a//b/"),
        (PREFIX, f"{PREFIX}/"),
        ("e\u0301/\u00e9?x#y", "e\u0301/\u00e9?x#y/"),
    ],
)
def test_the_prefix_stored_is_the_prefix_given(prefix: str, folder: str) -> None:
    model = ModelStore()
    storage = model.storage(url=f"memory://model/{prefix}")
    save_step(storage, claim_generation(storage, "a"), 10)
    assert latest_ref(storage) == StepRef(10, 1)
    assert all(key.startswith((f"{folder}generations/", f"{folder}step-")) for key in model.objects)
    assert storage.describe("x") == f"memory://model/{folder}x"


@pytest.mark.s3
@pytest.mark.parametrize("prefix", ["", f"{PREFIX}/"])
def test_a_bucket_with_dots_and_a_prefix_with_anything(seaweed: SeaweedServer, prefix: str) -> None:
    bucket = seaweed.make_bucket("my.ckpt.bucket")
    with BlockingStore(parse_url(f"s3://{bucket}"), seaweed.origin) as store:
        with open_storage(f"s3://{bucket}/{prefix}", seaweed.origin) as storage:
            save_step(storage, claim_generation(storage, "a"), 10)
            assert latest_ref(storage) == StepRef(10, 1)
            require_sound(storage, StepRef(10, 1))
        keys = [item.key for page in store.list("") for item in page.objects]
        store.delete(keys)
    assert all(key.startswith((f"{prefix}generations/", f"{prefix}step-")) for key in keys)


@pytest.mark.s3
def test_a_server_that_does_not_list_what_it_stores_is_found_out_at_the_claim(seaweed: SeaweedServer) -> None:
    """SeaweedFS keeps ``a//b`` under ``a/b`` and lists nothing under ``a//b``: every run would start from nothing."""
    bucket = seaweed.make_bucket("my.ckpt.bucket")
    with (
        open_storage(f"s3://{bucket}/double//slash", seaweed.origin) as storage,
        pytest.raises(CheckpointError, match=r"does not list what was just written.*without"),
    ):
        claim_generation(storage, "a")


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_named(seaweed: SeaweedServer) -> None:
    with (
        open_storage("s3://no-such-bucket/run", seaweed.origin) as storage,
        pytest.raises(NotFound, match="no-such-bucket"),
    ):
        claim_generation(storage, "a")


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    storage = open_storage("runs/one")
    monkeypatch.chdir(tmp_path / "there")
    save_step(storage, claim_generation(storage, "a"), 10)
    assert latest_ref(open_storage(tmp_path / "here" / "runs" / "one")) == StepRef(10, 1)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_symbolic_link_as_root_and_a_trailing_slash(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = open_storage(f"{tmp_path}/link/")
    save_step(storage, claim_generation(storage, "a"), 10)
    assert latest_ref(open_storage(tmp_path / "real")) == StepRef(10, 1)
    assert latest_ref(open_storage(f"file://{tmp_path}/link")) == StepRef(10, 1)


def test_files_are_for_other_tools_too_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        storage = open_storage(tmp_path / "store")
        save_step(storage, claim_generation(storage, "a"), 10)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "store").rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in (tmp_path / "store").rglob("*") if path.is_dir()}
    assert modes == {0o640}
    assert folders == {0o750}
