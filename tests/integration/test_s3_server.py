"""The servers that other tests rest on: SeaweedFS as a child process, and the proxy in front of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.errors import ConfigError, DeadlineExceeded
from cachefs.objstore import BlockingStore
from cachefs.testing.faults import Fault
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.02)


def test_secrets_stay_in_a_file_of_ours_alone(seaweed: SeaweedServer) -> None:
    config = seaweed.directory / "s3.json"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert json.loads(config.read_text())["identities"][0]["credentials"][0]["secretKey"] == seaweed.secret_key
    assert seaweed.secret_key not in repr(seaweed.origin)
    if sys.platform == "linux":
        argv = Path(f"/proc/{seaweed.pid}/cmdline").read_bytes()
        assert b"-ip.bind=127.0.0.1" in argv and seaweed.secret_key.encode() not in argv


def test_data_outlives_the_server_and_nothing_else_does(tmp_path: Path) -> None:
    with SeaweedServer(tmp_path) as server:
        with BlockingStore(f"s3://{server.make_bucket('kept')}", server.origin) as store:
            store.put("k", b"1")
        pid = server.pid
        assert pid is not None
        sockets = list(Path("/tmp").glob("seaweedfs-*.sock"))
        server.stop()
        server.stop()
    wait_until_gone(pid)
    assert set(Path("/tmp").glob("seaweedfs-*.sock")) < set(sockets)
    with SeaweedServer(tmp_path) as again, BlockingStore("s3://kept", again.origin) as store:
        assert bytes(store.get("k")[1]) == b"1"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a child with its parent")
def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from cachefs.testing.seaweed import SeaweedServer\n"
        "with SeaweedServer(sys.argv[1]) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    argv = Path(f"/proc/{pid}/cmdline").read_text()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(20)
    parent.stdout.close()
    wait_until_gone(pid)
    # Nobody was left to remove the sockets that weed makes in /tmp.
    for role, grpc, port in re.findall(r"-(\w+)\.port(\.grpc)?=(\d+)", argv):
        Path("/tmp", f"seaweedfs-{role}{'-grpc' if grpc else ''}-{port}.sock").unlink(missing_ok=True)


def test_a_server_that_does_not_get_ready_says_where_its_log_is(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not ready after 0 s.*weed\.log"), SeaweedServer(tmp_path, deadline=0):
        pass


# --- the proxy --------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[CountingProxy]:
    with CountingProxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
def behind(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str) -> Iterator[BlockingStore]:
    with BlockingStore(f"s3://{s3_bucket}", replace(seaweed.origin, endpoint=proxy.endpoint)) as store:
        yield store


def test_the_proxy_counts_what_passes(behind: BlockingStore, proxy: CountingProxy, s3_bucket: str) -> None:
    behind.put("a b/é", bytes(1000))
    meta = behind.head("a b/é")
    behind.get_range("a b/é", 10, 110, version=meta)
    seen = [(r.method, r.bucket, r.key, r.range, r.status, r.bytes_sent) for r in proxy.requests]
    assert seen == [
        ("PUT", s3_bucket, "a b/é", None, 200, 0),
        ("HEAD", s3_bucket, "a b/é", None, 200, 0),
        ("GET", s3_bucket, "a b/é", (10, 110), 206, 100),
    ]
    proxy.clear()
    assert proxy.requests == []


def test_large_bodies_pass_both_ways(behind: BlockingStore, proxy: CountingProxy) -> None:
    data = os.urandom(20 << 20)
    behind.put("k", data)
    assert bytes(behind.get("k")[1]) == data
    assert proxy.requests[-1].bytes_sent == len(data)


def test_faults_as_a_plain_client_sees_them(proxy: CountingProxy, behind: BlockingStore, s3_bucket: str) -> None:
    behind.put("k", bytes(100_000))
    address = proxy.endpoint.removeprefix("http://")

    def get(fault: Fault) -> http.client.HTTPResponse:
        proxy.faults.add(fault)
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", f"/{s3_bucket}/k")
        return connection.getresponse()

    reply = get(Fault(status=503))
    assert reply.status == 503 and b"SlowDown" in reply.read()
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        get(Fault(reset=True))
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        get(Fault(lose_reply=True))
    reply = get(Fault(cut_after=10))
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        reply.read()  # the refusal of an unsigned request, cut short


def test_the_rate_limits_what_all_connections_get_together(
    behind: BlockingStore, proxy: CountingProxy, s3_bucket: str
) -> None:
    behind.put("k", bytes(1_000_000))
    proxy.set_rate(2_000_000)
    began = time.monotonic()
    for _ in range(2):
        behind.get("k")
    assert time.monotonic() - began >= 0.9
    proxy.set_rate(None)


def test_the_proxy_stops_while_requests_hang(behind: BlockingStore, proxy: CountingProxy) -> None:
    behind.put("k", bytes(1000))
    proxy.faults.add(Fault(stall_after=10), times=None)
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)
    connection.request("GET", "/x/k")
    connection.getresponse()
    began = time.monotonic()
    proxy.stop()
    proxy.stop()
    assert time.monotonic() - began < 5
    connection.close()


def test_only_plain_http_can_be_proxied() -> None:
    with pytest.raises(ConfigError, match="plain http"):
        CountingProxy("https://127.0.0.1:1")


def test_the_servers_origin_has_what_a_child_process_needs(seaweed: SeaweedServer) -> None:
    origin = Origin.from_env(seaweed.env)
    assert origin.endpoint == seaweed.endpoint
    assert origin.secret_access_key == seaweed.secret_key
