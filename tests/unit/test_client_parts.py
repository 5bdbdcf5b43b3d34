"""Small parts of the client: pass-through memory, selections, progress, launching, maps."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.client import Client
from cachefs.config import Origin, Settings
from cachefs.connection import Lost
from cachefs.errors import CacheError, ConfigError, DaemonUnavailable, DeadlineExceeded, NearflashError
from cachefs.launch import crowd_lock, daemon_environment, make_runtime_dir, python_path, start_daemon
from cachefs.maps import private_map
from cachefs.passthrough import PassThrough
from cachefs.progress import byte_bar, human_bytes
from cachefs.protocol import Open
from cachefs.selection import select
from cachefs.session import Session
from cachefs.stopping import stop_and_wait
from cachefs.testing.clock import ManualClock
from cachefs.waiting import OpenArgs, Watch


def settings_in(folder: Path, **changes: object) -> Settings:
    return Settings(cache_dir=folder / "cache", socket=folder / "run" / "s.sock", **changes)  # type: ignore[arg-type]


# --- pass-through memory --------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 300), st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000))))
def test_pieces_are_fetched_once_and_only_those_asked_for(size: int, piece: int, ranges: list[tuple[int, int]]) -> None:
    data = random.Random(size).randbytes(size)
    fetched: list[int] = []

    def fetch(start: int, end: int, target: memoryview, until: float) -> None:
        assert end - start == len(target)
        fetched.append(start // piece)
        target[:] = data[start:end]

    memory = PassThrough(size, piece, fetch)
    wanted = set()
    for a, b in ranges:
        start, end = sorted((min(a, size), min(b, size)))
        memory.ensure(start, end)
        assert memory.has(start, end)
        wanted |= set(range(start // piece, -(-end // piece)))
        assert os.pread(memory.fd, end - start, start) == data[start:end]
    assert sorted(fetched) == sorted(wanted)
    memory.ensure(0, size)
    assert bytes(private_map(memory.fd, size)) == data
    memory.close()
    memory.close()


def test_threads_share_one_fetch_of_a_piece() -> None:
    calls: list[int] = []
    gate = threading.Event()

    def fetch(start: int, end: int, target: memoryview, until: float) -> None:
        calls.append(start)
        gate.wait(10)
        target[:] = b"x" * (end - start)

    memory = PassThrough(100, 100, fetch)
    threads = [threading.Thread(target=memory.ensure, args=(0, 100)) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert calls == [0]
    memory.close()


def test_a_failed_fetch_is_tried_again() -> None:
    fail = [True]

    def fetch(start: int, end: int, target: memoryview, until: float) -> None:
        if fail.pop():
            raise CacheError("no luck")
        target[:] = b"y" * (end - start)

    fail = [False, True]
    memory = PassThrough(10, 10, fetch)
    with pytest.raises(CacheError):
        memory.ensure(0, 10)
    assert not memory.has(0, 10)
    memory.ensure(0, 10)
    assert os.pread(memory.fd, 10, 0) == b"y" * 10
    memory.close()


def test_a_closed_descriptor_never_becomes_a_map_of_zeros() -> None:
    with pytest.raises(NearflashError, match="closed"):
        private_map(-1, 10)


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_wait_ends_when_nothing_new_comes_for_the_stall_time() -> None:
    watch = Watch(OpenArgs("s3://b/k", None, None, deadline=None, stall=10.0), now=0.0)
    assert watch.window() == 5.0
    watch.note(1, now=9.0)
    watch.note(1, now=15.0)
    assert watch.window() == 4.0
    watch.note(2, now=18.0)
    watch.note(2, now=28.0)
    with pytest.raises(DeadlineExceeded, match="k: nothing arrived for 10 s"):
        watch.window()


def test_a_deadline_holds_whatever_arrives() -> None:
    watch = Watch(OpenArgs("s3://b/k", None, None, deadline=3.0, stall=10.0), now=0.0)
    assert watch.window() == 3.0
    watch.note(1, now=2.0)
    assert watch.window() == 1.0
    watch.note(2, now=3.0)
    with pytest.raises(DeadlineExceeded, match="not all there after 3 s"):
        watch.window()


# --- command line parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "folder", "yes", "no"),
    [
        ("s3://b/k", None, ["s3://b/k"], ["s3://b/kk", "s3://b/k/"]),
        ("s3://b/d/", "s3://b/d/", ["s3://b/d/x", "s3://b/d/e/y"], ["s3://b/dx"]),
        ("s3://b", "s3://b/", ["s3://b/x", "s3://b/d/e"], ["s3://bb/x"]),
        ("s3://b/t-*.tar", "s3://b/", ["s3://b/t-1.tar"], ["s3://b/t-1.tar.gz", "s3://b/t-d/1.tar"]),
        ("s3://b/a/b*/c", "s3://b/a/", ["s3://b/a/b1/c"], ["s3://b/a/b1/d/c"]),
        ("s3://b/a/**.npy", "s3://b/a/", ["s3://b/a/x/y.npy", "s3://b/a/z.npy"], ["s3://b/z.npy"]),
        ("s3://b/[x]*", "s3://b/", ["s3://b/[x]1"], ["s3://b/x1"]),
    ],
)
def test_selections(text: str, folder: str | None, yes: list[str], no: list[str]) -> None:
    selection = select(text)
    assert selection.folder == folder
    assert [selection.matches(url) for url in yes] == [True] * len(yes)
    assert [selection.matches(url) for url in no] == [False] * len(no)


def test_local_paths_select_nothing() -> None:
    with pytest.raises(ConfigError, match="local path"):
        select("/data/x.tar")


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]


def test_a_bar_that_nobody_watches_costs_nothing() -> None:
    with byte_bar("x", 10) as advance:
        advance(5)


# --- launching ------------------------------------------------------------------------------------------------------


def test_the_daemons_environment_has_the_settings_and_no_relative_config(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, quota=5, idle_timeout=3.0, origin=Origin(secret_access_key="hush"))
    env = daemon_environment(settings, {"PATH": "/bin", "NEARFLASH_CONFIG": "x.toml", "NEARFLASH_AUTOSTART": "no"})
    assert env["NEARFLASH_QUOTA"] == "5"
    assert env["NEARFLASH_IDLE_TIMEOUT"] == "3.0"
    assert env["PATH"] == "/bin"
    assert not {"NEARFLASH_CONFIG", "NEARFLASH_AUTOSTART", "NEARFLASH_ORIGIN"} & set(env)
    assert "hush" not in repr(env)


def test_the_daemons_environment_has_nothing_of_one_clients_account(tmp_path: Path) -> None:
    where = {"AWS_CONFIG_FILE": "/c", "AWS_ROLE_ARN": "arn", "GOOGLE_APPLICATION_CREDENTIALS": "/g", "HTTPS_PROXY": "p"}
    own = {"AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL_S3": "e", "AWS_PROFILE": "p", "AZURE_STORAGE_SAS_TOKEN": "t"}
    env = daemon_environment(settings_in(tmp_path), {**where, **own, "GOOGLE_BEARER_TOKEN": "b", "FSSPEC_S3_KEY": "k"})
    assert where.items() <= env.items()
    assert not [name for name in env if name in own or name in {"GOOGLE_BEARER_TOKEN", "FSSPEC_S3_KEY"}]


def test_the_runtime_folder_is_made_private_and_checked(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    make_runtime_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    make_runtime_dir(folder)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        make_runtime_dir(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used for the daemon's socket"):
        make_runtime_dir(tmp_path / "file" / "x")


def test_one_client_starts_the_daemon_while_others_wait(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait(10)
        with crowd_lock(settings):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with crowd_lock(settings):
        inside.set()
        thread.join(0.1)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_lock_that_cannot_be_made_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    make_runtime_dir(settings.socket.parent)
    Path(f"{settings.socket}.start").mkdir()
    says = r"s\.sock\.start: cannot be used to start .* \(set NEARFLASH_SOCKET"
    with pytest.raises(ConfigError, match=says), crowd_lock(settings):
        raise AssertionError("not reached")


def test_installed_packages_never_come_before_the_standard_library(tmp_path: Path) -> None:
    packages, link = tmp_path / "site-packages", tmp_path / "link"
    packages.mkdir()
    link.symlink_to(packages)
    assert python_path(packages, [Path("/other"), link], None) is None
    assert python_path(packages, [link], "/mine") == "/mine"
    assert python_path(tmp_path, [link], None) == str(tmp_path)
    assert python_path(tmp_path, [link], "/mine") == f"{tmp_path}{os.pathsep}/mine"


class StoppingClient(Client):
    """Its daemon answers as often as ``answers`` says, once it was told to stop."""

    def __init__(self, settings: Settings, answers: float) -> None:
        super().__init__(settings)
        self.answers = answers

    def stop_daemon(self) -> None:
        pass

    def stats(self) -> dict[str, float | int | str | None]:
        self.answers -= 1
        if self.answers < 0:
            raise DaemonUnavailable("gone")
        return {}


def test_stopping_waits_for_the_end_and_not_for_ever(tmp_path: Path) -> None:
    clock = ManualClock()
    began = clock.monotonic()
    assert stop_and_wait(StoppingClient(settings_in(tmp_path), 10), clock)
    assert clock.monotonic() - began == pytest.approx(0.5)
    with pytest.raises(DeadlineExceeded, match="still answers after 20 s"):
        stop_and_wait(StoppingClient(settings_in(tmp_path), float("inf")), clock)
    assert clock.monotonic() - began < 21


def test_a_daemon_that_reports_nothing_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, chunk_size=1 << 16, transfer_bytes=1 << 16)
    broken = settings.with_(socket=tmp_path / "run" / ("s" * 200))
    with pytest.raises(ConfigError, match="NEARFLASH_SOCKET"):
        start_daemon(broken, timeout=60)


def test_a_session_without_daemon_flushes_and_closes_quietly(tmp_path: Path) -> None:
    session = Session(settings_in(tmp_path, autostart=False))
    session.give_back(7)
    session.flush()
    session.abandon()
    with pytest.raises(DaemonUnavailable):
        session.call(Open("s3://b/k"))
    session.close()
    session.close()


def test_a_request_on_which_the_daemon_always_dies_is_given_up(tmp_path: Path) -> None:
    class Dying(Session):
        """Every connection is lost as soon as a reply is awaited."""

        tries = 0

        def _connect(self, until):  # type: ignore[no-untyped-def]
            self.tries += 1
            return _Dead()

    class _Dead:
        settled = False

        def send(self, request: object, *, timeout: float, fds: object) -> None:
            raise Lost

        def retire(self) -> None:
            pass

    session = Dying(settings_in(tmp_path, connect_timeout=0.0))
    with pytest.raises(DaemonUnavailable, match="went away 5 times"):
        session.call(Open("s3://b/k"))
    assert session.tries == 5
