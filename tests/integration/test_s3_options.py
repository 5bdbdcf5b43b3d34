"""What settings of an origin do to requests, seen by who receives them."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.config import Origin, Settings
from cachefs.errors import ConfigError, NearflashError
from cachefs.objstore import BlockingStore
from cachefs.testing.node import node
from cachefs.testing.recorder import Recorder

BACKENDS = ("obstore", "fsspec")
KEY = base64.b64encode(bytes(range(32))).decode()
SETTINGS = Settings.load({}, request_deadline=30, stall_timeout=5)
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def store() -> Iterator[Recorder]:
    with Recorder() as running:
        yield running


@pytest.fixture
def proxy() -> Iterator[Recorder]:
    with Recorder() as running:
        yield running


def origin(endpoint: str, backend: str, **more: Any) -> Origin:
    return Origin(
        endpoint=endpoint, backend=backend, access_key_id="a", secret_access_key="b", region="us-east-1", **more
    )


def use(mine: Origin) -> None:
    """A bit of everything: HEAD, a range, a whole object, a PUT."""
    with BlockingStore("s3://bucket", mine, settings=SETTINGS) as opened:
        meta = opened.head("k")
        assert bytes(opened.get_range("k", 2, 5, version=meta)) == b"234"
        assert bytes(opened.get("k")[1]) == b"0123456789"
        opened.put("k", b"1")


def from_env(endpoint: str, backend: str, **variables: str) -> Origin:
    given = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return Origin.from_env({**given, "NEARFLASH_BACKEND": backend, "AWS_REGION": "us-east-1", **variables})


# --- proxies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_explicit_proxy_gets_the_requests(store: Recorder, proxy: Recorder, backend: str) -> None:
    use(from_env(store.url, backend, NEARFLASH_PROXY=proxy.url))
    assert [a.method for a in proxy.arrived] == ["HEAD", "GET", "GET", "PUT"]
    assert {a.target for a in proxy.arrived} == {f"{store.url}/bucket/k"}
    assert store.arrived == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_a_clients_environment_names_its_proxy(store: Recorder, proxy: Recorder, backend: str, name: str) -> None:
    """As an origin carries it to a daemon, whose own environment does not have it."""
    use(from_env(store.url, backend, **{name: proxy.url, "HTTPS_PROXY": "http://127.0.0.1:9"}))
    assert len(proxy.arrived) == 4 and store.arrived == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("past", ["127.0.0.1", "10.0.0.0/8, 127.0.0.0/8"])
def test_some_hosts_are_reached_past_the_proxy(
    store: Recorder, proxy: Recorder, backend: str, past: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)  # also in the environment of the process that has the store
    use(from_env(store.url, backend, HTTP_PROXY=proxy.url, NO_PROXY=past))
    use(from_env(store.url, backend, HTTP_PROXY=proxy.url, NEARFLASH_PROXY="none"))
    assert len(store.arrived) == 8 and proxy.arrived == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encrypted_connection_is_asked_of_the_proxy(proxy: Recorder, backend: str) -> None:
    mine = from_env("https://store.invalid", backend, HTTPS_PROXY=proxy.url)
    with (
        BlockingStore("s3://bucket", mine, settings=SETTINGS.with_(request_deadline=1)) as opened,
        pytest.raises(NearflashError),
    ):
        opened.head("k")
    assert {(a.method, a.target) for a in proxy.arrived} == {("CONNECT", "store.invalid:443")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_virtual_hosts_as_they_arrive(proxy: Recorder, backend: str) -> None:
    mine = from_env("http://oss.vpc.invalid", backend, NEARFLASH_PRESET="aliyun", NEARFLASH_PROXY=proxy.url)
    use(mine)
    assert {a.target for a in proxy.arrived} == {"http://bucket.oss.vpc.invalid/k"}
    assert {a.headers["host"] for a in proxy.arrived} == {"bucket.oss.vpc.invalid"}


def test_a_web_server_behind_a_proxy(store: Recorder, proxy: Recorder) -> None:
    with BlockingStore(f"{store.url}/k", Origin(proxy=proxy.url), settings=SETTINGS) as opened:
        assert bytes(opened.get_range("k", 0, 3)) == b"012"
    assert [a.target for a in proxy.arrived] == [f"{store.url}/k"] and store.arrived == []


def test_a_proxy_of_another_kind_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="socks5") as caught:
        BlockingStore("s3://bucket", origin("http://127.0.0.1:9", "obstore", proxy="socks5://me:secret@host:1"))
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(Origin(proxy="http://me:secret@host:1"))


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["NEARFLASH_CA_BUNDLE", "AWS_CA_BUNDLE"])
def test_a_private_authority_is_trusted_when_it_is_named(
    certificate: tuple[Path, Path], backend: str, name: str
) -> None:
    with Recorder(certificate=certificate[0], key=certificate[1]) as server:
        use(from_env(server.url, backend, **{name: str(certificate[0])}))
        assert len(server.arrived) == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_authority_is_not_trusted(certificate: tuple[Path, Path], backend: str) -> None:
    with Recorder(certificate=certificate[0], key=certificate[1]) as server:
        mine = from_env(server.url, backend)
        with (
            BlockingStore("s3://bucket", mine, settings=SETTINGS.with_(request_deadline=1)) as opened,
            pytest.raises(NearflashError),
        ):
            opened.head("k")
        assert server.arrived == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bundle_that_cannot_be_used_is_named(tmp_path: Path, backend: str) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    for path, says in ((tmp_path / "none.pem", "No such file"), (empty, "holds no certificate")):
        mine = origin("https://127.0.0.1:9", backend, ca_bundle=str(path))
        with (
            BlockingStore("s3://bucket", mine, settings=SETTINGS) as opened,
            pytest.raises(ConfigError, match=says) as caught,
        ):
            opened.head("k")
        assert str(path) in str(caught.value) and "CA_BUNDLE" in str(caught.value)


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_pays_is_said_with_every_request(store: Recorder, backend: str) -> None:
    use(from_env(store.url, backend, NEARFLASH_REQUESTER_PAYS="1"))
    assert {a.headers.get("x-amz-request-payer") for a in store.arrived} == {"requester"}
    assert all("x-amz-request-payer" in a.headers["authorization"] for a in store.arrived), "and signed"
    before = len(store.arrived)
    use(from_env(store.url, backend))
    assert all("x-amz-request-payer" not in a.headers for a in store.arrived[before:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_customers_key_goes_with_every_request_for_an_object(store: Recorder, backend: str) -> None:
    use(from_env(store.url, backend, NEARFLASH_SSE_CUSTOMER_KEY=KEY))
    assert [a.method for a in store.arrived] == ["HEAD", "GET", "GET", "PUT"]
    digest = base64.b64encode(hashlib.md5(bytes(range(32))).digest()).decode()
    for request in store.arrived:
        assert request.headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256", request.method
        assert request.headers["x-amz-server-side-encryption-customer-key"] == KEY
        assert request.headers["x-amz-server-side-encryption-customer-key-md5"] == digest


def test_a_daemon_does_as_its_client_says(store: Recorder, proxy: Recorder, tmp_path: Path) -> None:
    """One daemon, two clients: each one's requests go its own way."""
    plain = from_env(store.url, "obstore")
    special = from_env(
        store.url,
        "obstore",
        HTTP_PROXY=proxy.url,
        NEARFLASH_REQUESTER_PAYS="true",
        NEARFLASH_SSE_CUSTOMER_KEY=KEY,
    )
    with node(tmp_path, plain) as here, here.client() as first, here.client(origin=special) as second:
        with first.open("s3://bucket/one") as shard:
            assert bytes(shard.view()) == b"0123456789"
        assert store.arrived and proxy.arrived == []
        assert all("x-amz-request-payer" not in a.headers for a in store.arrived)
        direct = len(store.arrived)
        with second.open("s3://bucket/two") as shard:
            assert bytes(shard.view()) == b"0123456789"
        assert len(store.arrived) == direct
        assert {a.headers["x-amz-request-payer"] for a in proxy.arrived} == {"requester"}
        assert {a.headers["x-amz-server-side-encryption-customer-key"] for a in proxy.arrived} == {KEY}


def test_a_key_that_is_none_is_refused_and_never_shown() -> None:
    for wrong in ("short", KEY[:-4], "x" * 44):
        with pytest.raises(ConfigError, match="base64 form of 32 bytes") as caught:
            Origin(sse_customer_key=wrong)
        assert wrong not in str(caught.value)
    assert KEY not in repr(Origin(sse_customer_key=KEY))
