"""A save on a file system in which any one operation fails: a typed error that names the file, nothing lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cachefs.errors import CheckpointConflict, CheckpointError, Denied, NearflashError
from ckptstore.claims import Claim, claim_generation
from ckptstore.commit import begin_step
from ckptstore.fileops import SystemFileOps
from ckptstore.layout import StepRef, attempt_token, parse_temp, segment_name
from ckptstore.manifest import FileRef
from ckptstore.storage_posix import PosixStorage
from ckptstore.testing.crash import Op, RecordingOps
from ckptstore.testing.saving import require_sound, root_of, save_step, write_node
from ckptstore.timeline import committed_steps, latest_ref


class FailingOps(SystemFileOps):
    """Fails operations that ``fails(op)`` gives an errno for; ``op`` is counted among all, and named."""

    def __init__(self, fails: Callable[[int, Op], int | None]) -> None:
        super().__init__()
        self._fails = fails
        self._count = 0
        self._names: dict[int, str] = {}

    def _ask(self, op: Op) -> None:
        code = self._fails(self._count, op)
        self._count += 1
        if code is not None:
            raise OSError(code, os.strerror(code), op.path)

    def mkdir(self, path: str) -> None:
        self._ask(Op("mkdir", path))
        super().mkdir(path)

    def create(self, path: str) -> int:
        self._ask(Op("create", path))
        fd = super().create(path)
        self._names[fd] = path
        return fd

    def write(self, fd: int, views: Sequence[memoryview]) -> None:
        try:
            self._ask(Op("write", self._names[fd]))
        except OSError:
            os.write(fd, views[0][:1])  # a full disk takes a part
            raise
        super().write(fd, views)

    def fsync(self, fd: int) -> None:
        self._ask(Op("fsync", self._names[fd]))
        super().fsync(fd)

    def sync_folder(self, path: str) -> bool:
        self._ask(Op("sync_folder", path))
        return super().sync_folder(path)

    def rename_new(self, source: str, target: str) -> None:
        self._ask(Op("rename", source, target))
        super().rename_new(source, target)

    def link_new(self, source: str, target: str) -> None:
        self._ask(Op("link", source, target))
        super().link_new(source, target)


def operations_of_a_save(root: Path) -> int:
    ops = RecordingOps()
    claim = claim_generation(PosixStorage(root), "a")
    save_step(PosixStorage(root, ops=ops), claim, 10)
    return len(ops.ops)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_whichever_operation_of_a_save_fails_the_error_names_a_file_and_the_last_step_stays(
    code: int, tmp_path: Path
) -> None:
    count = operations_of_a_save(tmp_path / "count")
    assert count > 12
    for number in range(count):
        root = tmp_path / str(number)
        good = PosixStorage(root)
        claim = claim_generation(good, "a")
        save_step(good, claim, 10)
        bad = PosixStorage(root, ops=FailingOps(lambda n, op, number=number: code if n == number else None))
        with pytest.raises(NearflashError) as caught:
            save_step(bad, claim, 20)
        assert isinstance(caught.value, Denied if code == errno.EACCES else CheckpointError)
        assert str(root) in str(caught.value)
        assert "\n" not in str(caught.value)
        found = latest_ref(good)
        # The last operation makes the rename durable: the step is there then, but nobody was promised it.
        assert found == (StepRef(20, 1) if number == count - 1 else StepRef(10, 1)), number
        require_sound(good, found)


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    claim = claim_generation(PosixStorage(tmp_path), "a")
    bad = PosixStorage(
        tmp_path, ops=FailingOps(lambda n, op: errno.ENOSPC if op.path.endswith(".safetensors") else None)
    )
    with pytest.raises(CheckpointError, match=r"a-r00000-0000\.safetensors: No space left on device \(free space"):
        save_step(bad, claim, 10)


def test_after_a_failed_save_is_given_up_nothing_is_left_and_the_step_can_be_saved(tmp_path: Path) -> None:
    claim = claim_generation(PosixStorage(tmp_path), "a")
    state = {"fail": True}
    storage = PosixStorage(
        tmp_path,
        ops=FailingOps(lambda n, op: errno.ENOSPC if state["fail"] and op.path.endswith("manifest.json") else None),
    )
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(writer, 0, [b"x"])
    with pytest.raises(CheckpointError, match=r"manifest\.json: No space"):
        writer.commit(root_of(writer, [node]), node.files)
    assert writer.abort() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generations"]
    state["fail"] = False
    save_step(storage, claim, 10)
    assert committed_steps(storage) == [StepRef(10, 1)]


def test_a_writer_commits_once(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim = claim_generation(storage, "a")
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(writer, 0, [b"x"])
    writer.commit(root_of(writer, [node]), node.files)
    with pytest.raises(CheckpointError, match="by this writer before"):
        writer.commit(root_of(writer, [node]), node.files)


def test_what_cannot_be_removed_is_told_and_stays_hidden(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path, ops=FailingOps(lambda n, op: errno.EIO if op.name == "rename" else None))
    claim = claim_generation(storage, "a")
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    write_node(writer, 0, [b"x"])
    (problem,) = writer.abort()
    assert "cannot be removed" in str(problem)
    assert latest_ref(storage) is None
    (leftover,) = (path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    assert parse_temp(leftover) == (StepRef(10, 1), attempt_token("a"))


def test_a_file_system_without_folder_fsync_is_noted_as_weaker_and_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoFolderSync(SystemFileOps):
        def sync_folder(self, path: str) -> bool:
            return False

    storage = PosixStorage(tmp_path, ops=NoFolderSync())
    assert storage.weaknesses == ()
    save_step(storage, claim_generation(storage, "a"), 10)
    require_sound(storage, StepRef(10, 1))
    (weakness,) = storage.weaknesses
    assert "power cut" in weakness
    assert caplog.text.count("power cut") == 1


def test_without_renameat2_a_plain_rename_replaces_nothing_either(tmp_path: Path) -> None:
    ops = SystemFileOps(rename=lambda source, target: False)
    storage = PosixStorage(tmp_path, ops=ops)
    claim = claim_generation(storage, "a")
    first = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(first, 0, [b"x"])
    shutil.copytree(tmp_path / StepRef(10, 1).temp_folder("a"), tmp_path / "copy")
    first.commit(root_of(first, [node]), node.files)
    os.rename(tmp_path / "copy", tmp_path / StepRef(10, 1).temp_folder("a"))
    with pytest.raises(OSError) as caught:
        ops.rename_new(str(tmp_path / StepRef(10, 1).temp_folder("a")), str(tmp_path / StepRef(10, 1).folder))
    assert caught.value.errno in {errno.EEXIST, errno.ENOTEMPTY}
    require_sound(storage, StepRef(10, 1))


def test_where_links_are_lacking_a_record_is_moved_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    storage = PosixStorage(tmp_path)
    assert storage.create("generations/000001.json", b"first")
    assert not storage.create("generations/000001.json", b"second")
    assert [info.name for info in storage.list()] == ["generations/000001.json"]
    neither = PosixStorage(tmp_path, ops=SystemFileOps(rename=lambda source, target: False))
    with pytest.raises(Denied):
        neither.create("generations/000002.json", b"first")
    assert [info.name for info in storage.list()] == ["generations/000001.json"]


def test_a_foreign_folder_in_the_steps_place_is_left_alone(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim = claim_generation(storage, "a")
    (tmp_path / StepRef(10, 1).folder).mkdir()
    (tmp_path / StepRef(10, 1).folder / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="neither free nor taken"):
        save_step(storage, claim, 10)
    assert (tmp_path / StepRef(10, 1).folder / "mine").read_text() == "mine"
    assert latest_ref(storage) is None


def test_a_file_where_the_root_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = PosixStorage(tmp_path / "file")
    assert not storage.exists()
    for act in (lambda: latest_ref(storage), lambda: claim_generation(storage, "a")):
        with pytest.raises(CheckpointError, match=r"file.*(a file is where a folder should be|exists)"):
            act()


def test_a_late_abort_of_an_earlier_save_leaves_the_next_save_of_that_step_alone(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim = claim_generation(storage, "a")
    slow = begin_step(storage, 10, claim.generation, claim.attempt)
    quick = begin_step(storage, 10, claim.generation, claim.attempt)
    assert quick.abort(manifest_sent=False) == []
    again = begin_step(storage, 10, claim.generation, claim.attempt)
    node = write_node(again, 0, [b"x"])
    assert slow.abort(manifest_sent=False) == []
    again.commit(root_of(again, [node]), node.files)
    require_sound(storage, StepRef(10, 1))


def test_a_save_that_another_rank_gave_up_says_so(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim = claim_generation(storage, "a")
    one, two = (begin_step(storage, 10, claim.generation, claim.attempt) for _ in range(2))
    node = write_node(one, 0, [b"x"])
    assert two.abort() == []
    with pytest.raises(CheckpointError, match="was given up or committed by another process"):
        one.write(segment_name("a", 1, 0), [b"y"])
    with pytest.raises(CheckpointError, match="was given up or committed by another process"):
        one.commit(root_of(one, [node]), node.files)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where the test may mount one."""
    target = tmp_path / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(target)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_disk_that_really_fills_up(small_disk: Path) -> None:
    storage = PosixStorage(small_disk / "store")
    claim: Claim = claim_generation(storage, "a")
    save_step(storage, claim, 10)
    writer = begin_step(storage, 20, claim.generation, claim.attempt)
    with pytest.raises(CheckpointError, match=r"r00000-0000\.safetensors: No space left on device"):
        writer.write(segment_name("a", 0, 0), [bytes(1 << 20)])
    assert writer.abort() == []
    assert latest_ref(storage) == StepRef(10, 1)
    save_step(storage, claim, 20)
    require_sound(storage, StepRef(20, 1))


def test_a_commit_conflict_is_not_mistaken_for_a_disk_error(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim = claim_generation(storage, "a")
    writers = [begin_step(storage, 10, claim.generation, claim.attempt) for _ in range(2)]
    node = write_node(writers[0], 0, [b"x"])
    writers[0].commit(root_of(writers[0], [node]), node.files)
    with pytest.raises(CheckpointConflict, match="committed already"):
        begin_step(storage, 10, claim.generation, claim.attempt)
    with pytest.raises(CheckpointError, match="given up or committed"):
        writers[1].commit(root_of(writers[1], [node]), [FileRef(node.files[0].name, 1)])
    require_sound(storage, StepRef(10, 1))
