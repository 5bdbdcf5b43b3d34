"""Clients of other credentials and endpoints than those of the client that started the daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.errors import Denied, NearflashError
from cachefs.objstore import BlockingStore
from cachefs.testing.faults import Fault
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]

BACKENDS = ("obstore", "fsspec", "auto")


class Refuser:
    """An HTTP server (or proxy) that refuses everything and notes the heads of the requests."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                self.asked.append(sock.recv(4096).decode("latin-1"))
                sock.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def web_proxy() -> Iterator[Refuser]:
    proxy = Refuser()
    yield proxy
    proxy.close()


@pytest.fixture
def environment_of_a(
    seaweed: SeaweedServer, web_proxy: Refuser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CountingProxy]:
    """This process's environment is A's: keys, an endpoint (the proxy given), no files, no metadata service."""
    with CountingProxy(seaweed.endpoint) as proxy:
        for name, value in {
            "AWS_ACCESS_KEY_ID": seaweed.access_key,
            "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_ENDPOINT_URL_S3": proxy.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
            "AWS_CONFIG_FILE": str(tmp_path / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": "account-of-a",
            "AZURE_STORAGE_ACCOUNT_KEY": "azure-key-of-a",
            "HTTPS_PROXY": web_proxy.url,
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        yield proxy


@contextmanager
def started_by_a(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, Origin.from_env()) as here, here.client() as client:
        client.stats()
        yield here


def test_a_daemons_environment_holds_no_clients_keys_or_endpoints(
    environment_of_a: CountingProxy, seaweed: SeaweedServer, tmp_path: Path
) -> None:
    with started_by_a(tmp_path) as here:
        environ = Path(f"/proc/{here.daemon_pid}/environ").read_text()
        assert "AWS_SHARED_CREDENTIALS_FILE" in environ, "where files are is the node's affair"
        for secret in (seaweed.secret_key, seaweed.access_key, environment_of_a.endpoint, "azure-key-of-a"):
            assert secret not in environ


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_without_credentials_does_not_get_those_of_the_first(
    environment_of_a: CountingProxy, s3_bucket: str, tmp_path: Path, backend: str
) -> None:
    with started_by_a(tmp_path) as here:
        bare = Origin(endpoint=environment_of_a.endpoint, region="us-east-1", backend=backend)
        environment_of_a.clear()
        with here.client(origin=bare) as client, pytest.raises(Denied, match="no credentials found"):
            client.open(f"s3://{s3_bucket}/k")
        assert environment_of_a.requests == []


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_client_without_endpoint_goes_to_aws(
    environment_of_a: CountingProxy, s3_bucket: str, tmp_path: Path, web_proxy: Refuser, backend: str
) -> None:
    own = Origin(region="eu-west-1", access_key_id="own", secret_access_key="own", backend=backend)
    with started_by_a(tmp_path) as here, here.client(origin=own) as client:
        environment_of_a.clear()
        with pytest.raises(NearflashError):
            client.open(f"s3://{s3_bucket}/k", deadline=3.0)
        wait_until(lambda: bool(web_proxy.asked))
        wanted = {head.split("\r\n")[0] for head in web_proxy.asked}
        assert wanted == {f"CONNECT {s3_bucket}.s3.eu-west-1.amazonaws.com:443 HTTP/1.1"}
        assert environment_of_a.requests == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_one_process_the_origin_is_all_that_counts(
    environment_of_a: CountingProxy, seaweed: SeaweedServer, s3_bucket: str, backend: str
) -> None:
    """A store in this process: from the environment when asked for, and never by the way."""
    mine = replace(Origin.from_env(), backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", mine) as store:
        store.put("k", b"1")
        assert bytes(store.get("k")[1]) == b"1"
    assert environment_of_a.requests
    environment_of_a.clear()
    other = replace(seaweed.origin, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", other) as store:
        assert bytes(store.get("k")[1]) == b"1"
    bare = Origin(endpoint=seaweed.endpoint, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", bare) as store, pytest.raises(Denied, match="no credentials found"):
        store.get("k")
    assert environment_of_a.requests == []


def test_a_daemon_in_the_foreground_drops_what_it_was_started_with(
    environment_of_a: CountingProxy, s3_bucket: str, tmp_path: Path
) -> None:
    bare = Origin(endpoint=environment_of_a.endpoint, region="us-east-1")
    with node(tmp_path, bare) as here:
        env = {**os.environ, **here.environment(), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        process = subprocess.Popen(
            [sys.executable, "-m", "cachefs", "daemon", "--foreground"], env=env, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: here.daemon_pid == process.pid)
            with here.client(autostart=False) as client, pytest.raises(Denied, match="no credentials found"):
                client.open(f"s3://{s3_bucket}/k")
        finally:
            process.kill()
            process.wait(20)


@pytest.mark.usefixtures("environment_of_a")
def test_an_azure_container_is_reached_with_each_clients_own_account(web_proxy: Refuser, tmp_path: Path) -> None:
    with started_by_a(tmp_path) as here:
        for name in ("one", "two"):
            variables = {"ACCOUNT_NAME": name, "ACCOUNT_KEY": "a2V5", "ENDPOINT": web_proxy.url}
            mine = Origin.from_env({f"AZURE_STORAGE_{k}": v for k, v in variables.items()})
            with here.client(origin=mine) as client, pytest.raises(Denied):
                client.open("az://container/k")
            assert f"authorization: SharedKey {name}:" in web_proxy.asked[-1]


def test_a_token_that_stays_expired_is_denied_to_a_client_of_the_daemon(
    seaweed: SeaweedServer, s3_bucket: str, tmp_path: Path
) -> None:
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        store.put("k", b"1")
    with CountingProxy(seaweed.endpoint) as proxy:
        proxy.faults.add(Fault(status=400, code="ExpiredToken"), times=None)
        origin = replace(seaweed.origin, endpoint=proxy.endpoint)
        with node(tmp_path, origin) as here, here.client() as client:
            with pytest.raises(Denied, match="expired") as caught:
                client.open(f"s3://{s3_bucket}/k")
            assert type(caught.value) is Denied and caught.value.hint is not None
            proxy.faults.clear()
            with client.open(f"s3://{s3_bucket}/k") as shard:
                assert bytes(shard.view()) == b"1"


def test_keys_that_are_put_right_while_the_daemon_runs(
    seaweed: SeaweedServer, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        store.put("k", b"1")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(secret: str) -> None:
        part = file.with_suffix(".part")
        part.write_text(f"[default]\naws_access_key_id = {seaweed.access_key}\naws_secret_access_key = {secret}\n")
        part.replace(file)

    write("not-the-secret")
    with node(tmp_path, Origin(endpoint=seaweed.endpoint, region="us-east-1")) as here, here.client() as client:
        with pytest.raises(Denied, match="secret access key"):
            client.open(f"s3://{s3_bucket}/k")
        write(seaweed.secret_key)
        with client.open(f"s3://{s3_bucket}/k") as shard:
            assert bytes(shard.view()) == b"1"
