"""What a user sees when something about the store is wrong: one line, the right kind, soon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.errors import ClockSkewed, Denied, NearflashError, NotFound, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore import BlockingStore
from cachefs.testing.faults import Fault, RequestRecord
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]

BACKENDS = ("obstore", "fsspec", "auto")


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[CountingProxy]:
    with CountingProxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which no provider of credentials has any."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def error_of(call: Callable[[], object]) -> NearflashError:
    with pytest.raises(NearflashError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_bucket_key_and_secret(seaweed: SeaweedServer, s3_bucket: str, backend: str) -> None:
    origin = replace(seaweed.origin, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        for call in (store.head, store.get, lambda key: store.get_range(key, 0, 1)):
            error = error_of(lambda call=call: call("no/such.tar"))
            assert type(error) is NotFound and f"s3://{s3_bucket}/no/such.tar: no such object" in str(error)
    with BlockingStore("s3://no-such-bucket", origin) as store:
        calls: list[Callable[[], object]] = [
            lambda: store.head("k"),
            lambda: store.get("k"),
            lambda: list(store.list("")),
            lambda: store.put("k", b"1"),
        ]
        for call in calls:
            error = error_of(call)
            assert type(error) is NotFound and "no such bucket" in str(error) and "no-such-bucket" in str(error)
    with BlockingStore(f"s3://{s3_bucket}", replace(origin, secret_access_key="wrong")) as store:
        for call in (lambda: store.head("k"), lambda: store.get("k"), lambda: list(store.list(""))):
            error = error_of(call)
            assert type(error) is Denied and "AWS_SECRET_ACCESS_KEY" in str(error)
            assert "wrong" not in str(error).replace("a wrong", "")


def test_nobody_listens(seaweed: SeaweedServer) -> None:
    origin = replace(seaweed.origin, endpoint="http://127.0.0.1:9")
    began = time.monotonic()
    with BlockingStore("s3://bucket", origin) as store:
        error = error_of(lambda: store.head("k"))
    assert isinstance(error, Unavailable) and "is the endpoint right" in str(error)
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_credentials_at_all_and_a_metadata_service_that_never_answers(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}")
        origin = Origin(endpoint=seaweed.endpoint, region="us-east-1", backend=backend)
        began = time.monotonic()
        with BlockingStore("s3://bucket", origin) as store:
            error = error_of(lambda: store.head("k"))
        assert time.monotonic() - began < 8
    assert type(error) is Denied
    assert str(error).startswith("s3://bucket: no credentials found (set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


@pytest.mark.usefixtures("no_credentials")
def test_credentials_from_a_profile(
    seaweed: SeaweedServer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[team]\naws_access_key_id = {seaweed.access_key}\naws_secret_access_key = {seaweed.secret_key}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    origin = Origin(endpoint=seaweed.endpoint, region="us-east-1", profile="team")
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        store.put("k", b"1")
        assert [m.key for page in store.list("") for m in page.objects] == ["k"]
    with BlockingStore(f"s3://{s3_bucket}", replace(origin, profile="nobody")) as store:
        error = error_of(lambda: store.head("k"))
        assert type(error) is Denied and "nobody" in str(error)


@pytest.mark.usefixtures("no_credentials")
@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_credentials_that_were_rotated_in_their_file_are_read_again(
    seaweed: SeaweedServer,
    proxy: CountingProxy,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old-secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    proxy.faults.add(Fault(status=403, code="ExpiredToken"), method="GET")
    with BlockingStore(f"s3://{s3_bucket}", Origin(endpoint=proxy.endpoint, backend=backend)) as store:
        with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as good:
            good.put("k", b"1")
        file.write_text(
            f"[default]\naws_access_key_id = {seaweed.access_key}\naws_secret_access_key = {seaweed.secret_key}\n"
        )
        assert bytes(store.get("k")[1]) == b"1"
    assert [r.status for r in proxy.requests] == [403, 200]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_right_to_list(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str, backend: str) -> None:
    """Such a store says 403 for a missing key, and for every listing."""
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as owner:
        owner.put("a.tar", b"12345")

    def is_forbidden(request: RequestRecord) -> bool:
        return request.key != "a.tar"

    proxy.faults.add(Fault(status=403, code="AccessDenied"), matches=is_forbidden, times=None)
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        meta = store.head("a.tar")
        assert bytes(store.get_range("a.tar", 0, 5, version=meta)) == b"12345"
        for _ in range(2):
            for call in (store.head, store.get):
                error = error_of(lambda call=call: call("nope"))
                assert type(error) is Denied and "nope: missing or not allowed" in str(error)
        with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as owner:
            owner.put("nope", b"1")
        proxy.faults.clear()
        assert store.head("nope").size == 1, "that it was refused is not remembered"
        assert all(r.method in {"GET", "HEAD"} and r.key for r in proxy.requests), "neither a listing nor a new bucket"
        proxy.faults.add(Fault(status=403, code="AccessDenied"), matches=is_forbidden, times=None)
        error = error_of(lambda: list(store.list("dir/")))
        assert type(error) is Denied and "s3:ListBucket" in str(error) and "dir/" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_where_only_a_prefix_is_allowed(
    seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str, backend: str
) -> None:
    proxy.faults.add(
        Fault(status=403, code="AccessDenied"), matches=lambda r: not r.key.startswith("team/"), times=None
    )
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        store.put("team/x", b"1")
        store.put_multipart("team/y", [b"x" * 100])
        error = error_of(lambda: store.put("other/x", b"1"))
        assert type(error) is Denied and "s3:PutObject" in str(error)
    assert all(r.key for r in proxy.requests), "no request for the bucket itself"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_clock_is_called_that(
    seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str, backend: str
) -> None:
    proxy.faults.add(Fault(status=403, code="RequestTimeTooSkewed"), times=None)
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=backend)
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        for call in (lambda: store.head("k"), lambda: store.get("k"), lambda: store.put("k", b"1")):
            error = error_of(call)
            assert type(error) is ClockSkewed and "clock" in str(error)
            assert "denied" not in str(error) and "missing" not in str(error)


def test_no_secret_in_any_text(seaweed: SeaweedServer, s3_bucket: str) -> None:
    origin = replace(seaweed.origin, session_token="token-of-a-session")
    with BlockingStore(f"s3://{s3_bucket}", origin) as store:
        texts = [repr(store), repr(origin), str(origin)]
        for call in (lambda: store.head("k"), lambda: store.put("k", b"1")):
            with contextlib.suppress(NearflashError):
                call()
        error = error_of(lambda: store.get_range("nope", 0, 1))
        while error is not None:
            texts += [str(error), repr(error)]
            error = error.__cause__  # type: ignore[assignment]
    for text in texts:
        assert seaweed.secret_key not in text and "token-of-a-session" not in text


def test_in_a_forked_child(seaweed: SeaweedServer, s3_bucket: str) -> None:
    import multiprocessing

    metrics = Metrics()
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin, metrics=metrics) as store:
        store.put("k", b"from the parent")
        context = multiprocessing.get_context("fork")
        results = context.Queue()

        def child() -> None:
            results.put(bytes(store.get("k")[1]))
            store.put("from-child", b"hello")
            store.close()
            results.put(
                [m.key for page in BlockingStore(f"s3://{s3_bucket}", seaweed.origin).list("") for m in page.objects]
            )

        process = context.Process(target=child)
        process.start()
        assert results.get(timeout=60) == b"from the parent"
        assert results.get(timeout=60) == ["from-child", "k"]
        process.join(30)
        assert process.exitcode == 0
        assert bytes(store.get("from-child")[1]) == b"hello"
        assert threading.active_count() >= 2
