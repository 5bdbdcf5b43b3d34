"""Real daemons, real clients in several processes, a real S3 server behind a proxy that counts."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cachefs.client import Client
from cachefs.config import MIB
from cachefs.errors import CacheError, ConfigError, DaemonUnavailable, DeadlineExceeded, Denied, NotFound, StoreError
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = pytest.mark.s3


@dataclass
class World:
    """A node whose origin is a bucket behind a counting proxy."""

    node: Node
    proxy: CountingProxy
    seaweed: SeaweedServer
    bucket: str

    def put(self, key: str, size: int, seed: int = 0) -> bytes:
        data = random.Random(f"{seed}{key}").randbytes(size)
        put(self.seaweed, self.bucket, key, data)
        self.proxy.clear()
        return data

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def gets(self) -> list[tuple[int, int] | None]:
        return [r.range for r in self.proxy.requests if r.method == "GET" and r.key]


def put(seaweed: SeaweedServer, bucket: str, key: str, data: bytes) -> None:
    from cachefs.objstore import BlockingStore

    with BlockingStore(f"s3://{bucket}", seaweed.origin) as store:
        store.put(key, data)


@pytest.fixture
def world(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str) -> Iterator[World]:
    with (
        CountingProxy(seaweed.endpoint) as proxy,
        node(tmp_path, replace(seaweed.origin, endpoint=proxy.endpoint)) as n,
    ):
        yield World(n, proxy, seaweed, s3_bucket)


READER = """
import hashlib, sys
from cachefs.client import connect
client = connect()
print("ready", flush=True)
sys.stdin.readline()
with client.open(sys.argv[1]) as shard:
    print(hashlib.sha256(shard.view()).hexdigest(), shard.cached, flush=True)
sys.stdin.readline()
"""


def start_reader(world: World, key: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, world.url(key)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=world.node.environment(),
    )


def say(process: subprocess.Popen[str], word: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def sha(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def test_eight_processes_that_open_a_cold_object_at_once_cost_one_set_of_gets(world: World) -> None:
    data = world.put("shard", 8 * MIB + 1000)
    readers = [start_reader(world, "shard") for _ in range(8)]
    assert [hear(r) for r in readers] == ["ready"] * 8
    for reader in readers:
        say(reader)
    assert [hear(r) for r in readers] == [f"{sha(data)} True"] * 8
    for reader in readers:
        say(reader)
        assert reader.wait(20) == 0
    gets = world.gets()
    assert len(gets) == 9
    assert len(set(gets)) == 9
    assert sum(r.method == "HEAD" for r in world.proxy.requests) == 1


def test_a_reader_that_is_killed_half_way_takes_nothing_from_the_others(world: World) -> None:
    data = world.put("shard", 8 * MIB)
    world.proxy.set_rate(4 * MIB)
    readers = [start_reader(world, "shard") for _ in range(4)]
    for reader in readers:
        hear(reader)
        say(reader)
    wait_until(lambda: len(world.gets()) > 2)
    readers[0].kill()
    world.proxy.set_rate(None)
    assert [hear(r) for r in readers[1:]] == [f"{sha(data)} True"] * 3
    for reader in readers:
        reader.kill()
        reader.wait(20)
    assert len(set(world.gets())) == len(world.gets()) == 8


def test_a_view_lies_in_the_entrys_file_and_writes_reach_nobody(world: World) -> None:
    data = world.put("shard", 3 * MIB + 5)
    with world.node.client() as client, client.open(world.url("shard")) as shard:
        array = np.frombuffer(shard.view(), dtype=np.uint8)
        file = mapped_file(array.ctypes.data)
        assert file.is_relative_to(world.node.settings.cache_dir)
        assert os.stat(file).st_ino == os.fstat(shard.fileno()).st_ino
        assert array.tobytes() == data
        array[:] = 255
        assert file.read_bytes() == data
        assert sha(shard.view()) == sha(data)
        with client.open(world.url("shard")) as second:
            assert sha(second.view()) == sha(data)
        reader = start_reader(world, "shard")
        say(reader)
        assert hear(reader) == "ready"
        assert hear(reader) == f"{sha(data)} True"
        say(reader)
        reader.wait(20)
    assert array[0] == 255, "the view outlives shard and client"
    with pytest.raises(OSError, match=r"(?i)not permitted|bad file|permission"):
        os.write(shard_fd_of(world), b"x")


def shard_fd_of(world: World) -> int:
    """A descriptor as clients get it."""
    shard = world.node.client().open(world.url("shard"))
    shard.wait(0, shard.size)
    fd = os.dup(shard.fileno())
    shard.close()
    return fd


def mapped_file(address: int) -> Path:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            assert line.split()[1] == "rw-p"
            return Path(line.split(maxsplit=5)[5])
    raise AssertionError(f"{address:#x} is not mapped")


def spawned(client: Client, url: str) -> str:
    with client.open(url) as shard:
        return sha(shard.view())


def test_forked_and_spawned_children_go_on_with_the_parents_client(world: World) -> None:
    first, second = world.put("a", 2 * MIB), world.put("b", 2 * MIB)
    with world.node.client() as client:
        shard = client.open(world.url("a"))
        view = shard.view()
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            with context.Pool(2) as pool:
                got = pool.starmap(spawned, [(client, world.url("a")), (client, world.url("b"))] * 2)
            assert got == [sha(first), sha(second)] * 2
        child = os.fork()
        if child == 0:
            try:
                view[:8] = b"childish"
                same = sha(shard.view()) == sha(first) and spawned(client, world.url("b")) == sha(second)
                shard.close()
                client.close()
            finally:
                os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(view[:8]) == first[:8]
        assert client.stats()["leases"] == 1, "the child's close did not touch the parent's lease"
        shard.close()
        assert spawned(client, world.url("b")) == sha(second)
    assert len(world.gets()) == 4


def test_threads_share_one_client(world: World) -> None:
    data = {f"k{i}": world.put(f"k{i}", 300_000, i) for i in range(8)}
    wrong: list[str] = []
    with world.node.client() as client:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(20):
                key = rng.choice(list(data))
                if spawned(client, world.url(key)) != sha(data[key]):
                    wrong.append(key)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert len(world.gets()) == 8


def test_a_daemon_killed_during_a_wait_is_restarted_and_the_wait_goes_on(world: World) -> None:
    data = world.put("shard", 12 * MIB)
    world.proxy.set_rate(6 * MIB)
    with world.node.client() as client:
        shard = client.open(world.url("shard"))
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.append(sha(shard.view())))
        thread.start()
        wait_until(lambda: sum(r.bytes_sent for r in world.proxy.requests) > 4 * MIB)
        first = world.node.daemon_pid
        assert world.node.kill_daemon()
        world.proxy.set_rate(None)
        thread.join(60)
        assert got == [sha(data)]
        assert world.node.daemon_pid != first
        assert client.stats()["leases"] == 1
        shard.close()


def test_a_filling_map_goes_on_after_its_daemon_was_killed(world: World) -> None:
    """The heir fills the same file, so nobody has to map it anew."""
    data = world.put("shard", 12 * MIB + 5)
    world.proxy.set_rate(6 * MIB)
    with world.node.client() as client, client.open(world.url("shard")) as shard:
        filling = shard.filling()
        assert bytes(filling.view[8 * MIB :]) == bytes(4 * MIB + 5)
        filling.ready(0, 3 * MIB)
        assert sha(filling.view[: 3 * MIB]) == sha(data[: 3 * MIB])
        assert world.node.kill_daemon()
        world.proxy.set_rate(None)
        for start in range(0, len(data), 100_000):
            end = min(start + 100_000, len(data))
            filling.ready(start, end)
            assert filling.view[start:end] == data[start:end]
        assert sha(filling.view) == sha(data)


def test_mapped_entries_stay_readable_without_a_daemon(world: World) -> None:
    data = world.put("shard", 2 * MIB)
    with world.node.client() as client:
        shard = client.open(world.url("shard"))
        shard.wait(0, shard.size)
        world.node.kill_daemon()
        wait_until(lambda: not world.node.daemon_runs)
        assert sha(shard.view()) == sha(data), "all chunks are present: nobody needs to be asked"
        assert not world.node.daemon_runs
        shard.close()


def test_an_idle_daemon_ends_and_the_next_call_starts_another(tmp_path: Path, world: World) -> None:
    data = world.put("shard", MIB)
    with node(tmp_path / "n2", world.node.settings.origin, idle_timeout=1.0) as short:
        with short.client() as client:
            assert spawned(client, world.url("shard")) == sha(data)
            pid = short.daemon_pid
            time.sleep(1.6)
            assert short.daemon_runs, "it has a client"
        wait_until(lambda: not short.daemon_runs)
        assert not short.settings.socket.exists()
        world.proxy.clear()
        with short.client() as client:
            assert spawned(client, world.url("shard")) == sha(data)
        assert short.daemon_pid != pid
        assert world.gets() == [], "the cache outlives the daemon"


def test_sigterm_ends_a_busy_daemon_soon_and_cleanly(world: World) -> None:
    world.put("shard", 16 * MIB)
    world.proxy.set_rate(MIB)
    with world.node.client() as client:
        client.open(world.url("shard"))
        client.prefetch([world.url("shard")])
        wait_until(lambda: bool(world.gets()))
        began = time.monotonic()
        world.node.kill_daemon(signal.SIGTERM)
        world.node.kill_daemon(signal.SIGTERM)
        wait_until(lambda: not world.node.daemon_runs, 12)
        assert time.monotonic() - began < 11
        assert not world.node.settings.socket.exists()
    log = (world.node.settings.cache_dir / "daemon.log").read_text()
    assert '"stopping"' in log
    assert '"defect"' not in log


def test_the_daemon_is_nobodys_child_and_keeps_no_descriptor_of_its_starter(world: World, tmp_path: Path) -> None:
    with open(tmp_path / "inherited", "w") as file, world.node.client() as client:
        os.set_inheritable(file.fileno(), True)
        client.stats()
        pid = world.node.daemon_pid
        assert pid is not None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) != os.getpid()
        assert int(fields[3]) != os.getsid(0)
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert str(tmp_path / "inherited") not in targets
        assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)] == ["/dev/null"] * 3
        assert not [t for t in targets if t.startswith("pipe:")]
        command = Path(f"/proc/{pid}/cmdline").read_text()
        secret = world.node.settings.origin.secret_access_key
        assert secret
        assert secret not in command
        for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_racing_daemons_leave_one_and_the_losers_name_it(world: World) -> None:
    command = [sys.executable, "-m", "cachefs", "daemon", "--foreground"]
    racers = [
        subprocess.Popen(command, env=world.node.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    try:
        wait_until(lambda: sum(r.poll() is None for r in racers) == 1, 60)
        wait_until(lambda: world.node.daemon_pid is not None)
        (winner,) = [r for r in racers if r.poll() is None]
        losers = [r for r in racers if r is not winner]
        assert [r.returncode for r in losers] == [1, 1, 1]
        where = world.node.settings.cache_dir
        says = f"cachefs: {where}: a daemon serves already, pid {winner.pid} (cachefs stop ends it)\n"
        assert [r.communicate() for r in losers] == [(b"", says.encode())] * 3
        with world.node.client(autostart=False) as client:
            assert client.stats()["pid"] == winner.pid
        winner.send_signal(signal.SIGINT)
        assert winner.wait(15) == 0
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_clients_that_race_to_start_a_daemon_all_get_the_same(world: World) -> None:
    world.put("shard", 1000)
    readers = [start_reader(world, "shard") for _ in range(6)]
    for reader in readers:
        hear(reader)
    for reader in readers:
        say(reader)
    assert all(hear(r).endswith("True") for r in readers)
    with world.node.client(autostart=False) as client:
        stats = client.stats()
    assert stats["clients"] == 7
    for reader in readers:
        say(reader)
        assert reader.wait(20) == 0


def test_a_daemon_that_cannot_start_tells_the_client_why(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").write_text("mine")
    settings = world.node.settings.with_(cache_dir=tmp_path / "file")
    with Client(settings) as client, pytest.raises(CacheError, match=r"file: is not a directory \(set cache_dir") as e:
        client.stats()
    assert "\n" not in str(e.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_socket_folder_of_others_is_refused(tmp_path: Path, world: World) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    settings = world.node.settings.with_(socket=shared / "s.sock")
    with Client(settings) as client, pytest.raises(ConfigError, match="can be changed by other users"):
        client.stats()


def test_two_sockets_for_one_cache_directory_name_the_owner(tmp_path: Path, world: World) -> None:
    with world.node.client() as client, node(tmp_path, world.node.settings.origin) as second:
        pid = client.stats()["pid"]
        with pytest.raises(CacheError, match=f"held by pid {pid}"):
            second.client(connect_timeout=15.0).stats()


def test_a_socket_that_a_cleaner_removed_comes_back(world: World) -> None:
    with world.node.client() as client:
        pid = client.stats()["pid"]
        world.node.settings.socket.unlink()
        wait_until(lambda: world.node.settings.socket.exists())
        assert stat.S_IMODE(os.stat(world.node.settings.socket).st_mode) == 0o600
        with world.node.client(autostart=False) as other:
            assert other.stats()["pid"] == pid


def test_a_daemon_that_hangs_is_given_up_by_a_deadline(world: World) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(world.node.settings.socket))
        mute.listen()
        with world.node.client(connect_timeout=1.0) as client, pytest.raises(DaemonUnavailable, match="not answered"):
            client.stats()


@pytest.mark.parametrize("quota", [0, MIB])
def test_a_quota_smaller_than_the_object_passes_through(tmp_path: Path, world: World, quota: int) -> None:
    data = world.put("big", 4 * MIB)
    with node(tmp_path / "small", world.node.settings.origin, quota=quota) as small, small.client() as client:
        began = time.monotonic()
        with client.open(world.url("big")) as shard:
            assert not shard.cached
            assert f"quota of {quota} bytes" in shard.uncached_reason
            shard.wait(0, 10)
            assert len(world.gets()) == 1, "only the pieces that are asked for"
            view = shard.view()
            assert sha(view) == sha(data)
            view[:4] = b"mine"
            assert sha(shard.view()) == sha(data)
            assert os.pread(shard.fileno(), 100, MIB) == data[MIB : MIB + 100]
            assert len(world.gets()) == 4, "each piece once, whatever is read from it"
        assert time.monotonic() - began < 20
        assert client.entries() == []


def test_a_quota_for_one_of_two_pinned_objects(tmp_path: Path, world: World) -> None:
    one, two = world.put("one", 4 * MIB), world.put("two", 4 * MIB)
    with node(tmp_path / "small", world.node.settings.origin, quota=5 * MIB) as small, small.client() as client:
        a, b = client.open(world.url("one")), client.open(world.url("two"))
        assert (sha(a.view()), sha(b.view())) == (sha(one), sha(two))
        assert (a.cached, b.cached) == (True, False)
        stats = client.stats()
        assert int(stats["used_bytes"] or 0) <= 5 * MIB
        a.close()
        wait_until(lambda: client.open(world.url("two")).cached)


@pytest.mark.parametrize(
    ("place", "kind", "says"),
    [
        ("s3://{bucket}/folder", NotFound, "is a prefix (a directory) with objects under it"),
        ("s3://{bucket}/absent", NotFound, "no such object"),
        ("s3://{bucket}/folder/a/below", NotFound, "no such object"),
        ("s3://no-such-bucket-here/k", NotFound, "no such bucket"),
    ],
)
def test_a_wrong_place_is_one_line_that_names_it(world: World, place: str, kind: type[StoreError], says: str) -> None:
    world.put("folder/a", 10)
    url = place.format(bucket=world.bucket)
    with world.node.client() as client:
        for call in (client.open, client.stat, client.read):
            with pytest.raises(kind) as caught:
                call(url)
            assert type(caught.value) is kind
            text = str(caught.value)
            assert "\n" not in text
            assert text.startswith(url)
            assert says in text


def test_small_objects_are_read_as_they_were_put(world: World) -> None:
    first = world.put("folder/a", 10)
    with world.node.client() as client:
        assert client.read(world.url("folder/a")) == first
        second = world.put("folder/a", 5000, seed=1)
        assert client.read(world.url("folder/a")) == second != first
        assert client.entries() == [], "past the cache"


def test_wrong_credentials_name_the_object_and_the_way_out(world: World) -> None:
    world.put("folder/a", 10)
    wrong = replace(world.node.settings.origin, secret_access_key="mistyped")
    with world.node.client(origin=wrong) as client, pytest.raises(Denied) as caught:
        client.open(world.url("folder/a"))
    text = str(caught.value)
    assert text == (
        f"{world.url('folder/a')}: the secret access key does not fit the access key"
        " (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; NEARFLASH_ANONYMOUS=1 for a public bucket)"
    )


def test_no_credentials_is_an_error_that_says_so(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world.put("k", 10)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bare = replace(world.node.settings.origin, access_key_id=None, secret_access_key=None)
    with world.node.client(origin=bare) as client, pytest.raises(Denied) as caught:
        client.open(world.url("k"))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"s3://{world.bucket}")
    assert "no credentials found (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in text
    assert world.proxy.requests == [], "nobody is asked without credentials"


def test_a_wait_without_progress_ends_by_its_deadline(world: World) -> None:
    world.put("shard", 4 * MIB)
    with world.node.client() as client:
        shard = client.open(world.url("shard"), deadline=30.0)
        shard.wait(0, shard.size)
        world.put("slow", 4 * MIB)
        client.stat(world.url("slow"))
        world.proxy.set_rate(1000.0)
        slow = client.open(world.url("slow"), deadline=1.0)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="slow: not all there after 1 s"):
            slow.view()
        assert time.monotonic() - began < 10
        world.proxy.set_rate(None)


def test_prefetch_returns_at_once_and_brings_everything(world: World) -> None:
    data = {f"p{i}": world.put(f"p{i}", 700_000, i) for i in range(6)}
    with world.node.client() as client:
        client.prefetch(client.list(f"s3://{world.bucket}"))
        wait_until(lambda: sum(e.cached_bytes for e in client.entries()) == 6 * 700_000)
        wait_until(lambda: client.stats()["fills"] == 6)
        gets = len(world.gets())
        for key, value in data.items():
            assert spawned(client, world.url(key)) == sha(value)
        assert len(world.gets()) == gets == 6
        assert sum(r.method == "HEAD" for r in world.proxy.requests) == 6, "one each for the opens without a version"


def test_counters_are_there_before_anything_was_counted(world: World) -> None:
    with world.node.client() as client:
        stats = client.stats()
    names = ("origin_gets", "origin_get_bytes", "origin_heads", "origin_lists", "origin_retries")
    assert [stats[name] for name in (*names, "open_hits", "open_misses", "fills")] == [0] * 8


def test_evict_stats_and_entries(world: World) -> None:
    world.put("a", MIB)
    world.put("b", MIB)
    with world.node.client() as client:
        with client.open(world.url("a")) as held:
            held.wait(0, MIB)
            with client.open(world.url("b")) as other:
                other.wait(0, MIB)
            gone = client.evict([world.url("a"), world.url("b")])
            assert (gone.entries, gone.busy) == (1, 1)
            assert {e.url for e in client.entries()} == {world.url("a")}
        gone = client.evict(None)
        assert (gone.entries, gone.busy) == (1, 0)
        assert client.stats()["entries"] == 0


def test_odd_keys_stay_inside_the_cache_directory(tmp_path: Path, world: World) -> None:
    keys = ["a b", "x+y", "p%41", "ü-é", "n" * 250, "/".join(["d" * 100] * 5), "UPPER", "upper", "q?x=1", "h#1"]
    data = {key: world.put(key, 1000, i) for i, key in enumerate(keys)}
    outside = {p for p in tmp_path.rglob("*") if not p.is_relative_to(world.node.settings.cache_dir)}
    with world.node.client() as client:
        for key, value in data.items():
            assert spawned(client, world.url(key)) == sha(value), key
        assert len(client.entries()) == len(keys)
    assert {p for p in tmp_path.rglob("*") if not p.is_relative_to(world.node.settings.cache_dir)} == outside


def test_files_of_the_user_in_the_cache_directory_are_never_touched(tmp_path: Path, world: World) -> None:
    data = [world.put(f"s{i}", 2 * MIB, i) for i in range(5)]
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "precious").write_bytes(b"p" * 100_000)
    with node(tmp_path / "n3", world.node.settings.origin, quota=5 * MIB) as small:
        with small.client() as client:
            client.stats()  # the cache is made; a folder of other things would not become one
        own = small.settings.cache_dir / "orig"
        own.mkdir(parents=True)
        (own / "0.tar").write_bytes(b"o" * 200_000)
        (small.settings.cache_dir / "link").symlink_to(target)
        with small.client() as client:
            for i, value in enumerate(data):
                assert spawned(client, world.url(f"s{i}")) == sha(value)
            assert int(client.stats()["flash_evicted"] or 0) >= 2
            local = client.open(own / "0.tar")
            assert bytes(local.view()) == b"o" * 200_000
            client.evict(None)
        assert (own / "0.tar").read_bytes() == b"o" * 200_000
        assert (target / "precious").read_bytes() == b"p" * 100_000
