"""The whole way to a real S3 server through a proxy that misbehaves: right bytes or a typed error, by the deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cachefs.config import Settings
from cachefs.errors import Changed, Corrupt, Denied, PreconditionFailed, StoreError, Throttled, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore import BlockingStore, ObjectStore, open_store
from cachefs.testing.faults import Fault
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]

DEADLINE = 20.0
SETTINGS = Settings.load({}, stall_timeout=1, request_deadline=DEADLINE)
DATA = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[CountingProxy]:
    with CountingProxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture(params=["obstore", "fsspec"])
def store(
    request: pytest.FixtureRequest, seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str
) -> Iterator[BlockingStore]:
    """A store behind the proxy, with one object ``k`` in it."""
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as owner:
        owner.put("k", DATA)
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=request.param)
    with BlockingStore(f"s3://{s3_bucket}", origin, settings=SETTINGS, metrics=Metrics()) as opened:
        yield opened


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reset=True),
        Fault(cut_after=0),
        Fault(cut_after=1_000_000),
        Fault(stall_after=500_000),
        Fault(latency=3),
        Fault(status=503),
        Fault(status=500, code="InternalError"),
        Fault(status=429, code="TooManyRequests"),
        Fault(shift_range=100),
        Fault(whole=True),
        Fault(rate=3e6),
    ],
    ids=str,
)
def test_a_read_survives_a_fault(store: BlockingStore, proxy: CountingProxy, fault: Fault) -> None:
    meta = store.head("k")
    proxy.clear()
    proxy.faults.add(fault, method="GET")
    assert bytes(store.get_range("k", 5, 2_500_000, version=meta)) == DATA[5:2_500_000]
    assert proxy.requests[0].fault == fault
    assert len(proxy.requests) >= (1 if fault.rate else 2)


def test_an_error_in_the_body_of_a_success_is_no_object(store: BlockingStore, proxy: CountingProxy) -> None:
    proxy.faults.add(Fault(status=200, code="SlowDown"), times=1)
    assert store.head("k").size == len(DATA)
    for code in ("SlowDown", "InternalError"):
        proxy.faults.add(Fault(status=200, code=code), method="GET", times=2)
        assert bytes(store.get("k")[1]) == DATA
    proxy.faults.add(Fault(status=200, code="ExpiredToken"), method="GET", times=None)
    with pytest.raises(Denied, match="expired"):
        store.get("k")


def test_a_reply_of_another_version_is_refused(store: BlockingStore, proxy: CountingProxy) -> None:
    meta = store.head("k")
    proxy.faults.add(Fault(etag='"another"'), method="GET")
    with pytest.raises(Changed):
        store.get_range("k", 0, 100, version=meta)


def test_a_server_that_ignores_ranges_is_told_from_one_that_fails(store: BlockingStore, proxy: CountingProxy) -> None:
    meta = store.head("k")
    proxy.faults.add(Fault(whole=True), method="GET", times=None)
    with pytest.raises(Corrupt, match="gave up after 4 tries"):
        store.get_range("k", 100, 200, version=meta)


def test_a_proxy_that_cuts_every_long_reply_is_outwitted(store: BlockingStore, proxy: CountingProxy) -> None:
    meta = store.head("k")

    def is_long(request: object) -> bool:
        span = getattr(request, "range", None)
        return span is not None and span[1] - span[0] > 1_200_000

    proxy.faults.add(Fault(cut_after=1_200_000), method="GET", matches=is_long, times=None)
    assert bytes(store.get_range("k", 0, len(DATA), version=meta)) == DATA


def test_a_storm_of_503_passes(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str) -> None:
    metrics = Metrics()
    origin = replace(seaweed.origin, endpoint=proxy.endpoint)
    with BlockingStore(f"s3://{s3_bucket}", origin, settings=SETTINGS, metrics=metrics) as store:
        store.put("k", DATA)
        proxy.faults.add(Fault(status=503), method="GET", times=6)
        for _ in range(4):
            assert bytes(store.get_range("k", 0, 1000)) == DATA[:1000]
    assert metrics.get("origin_throttled") == 6
    assert metrics.get("origin_retries") == 6


def test_a_late_read_is_asked_for_again(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str) -> None:
    metrics = Metrics()
    origin = replace(seaweed.origin, endpoint=proxy.endpoint)
    patient = SETTINGS.with_(stall_timeout=60, request_deadline=90, hedge_share=0.05)
    with BlockingStore(f"s3://{s3_bucket}", origin, settings=patient, metrics=metrics) as store:
        store.put("k", DATA)
        meta = store.head("k")
        for at in range(0, 120_000, 1000):
            store.get_range("k", at, at + 1000, version=meta)
        proxy.faults.add(Fault(latency=60), method="GET")
        began = time.monotonic()
        assert bytes(store.get_range("k", 5000, 6000, version=meta)) == DATA[5000:6000]
        assert time.monotonic() - began < 45
    assert metrics.get("origin_hedges_won") >= 1
    assert metrics.get("origin_get_bytes") == 121_000, "what is thrown away does not count"


def test_a_store_that_never_recovers_is_an_error_by_the_deadline(
    seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str
) -> None:
    origin = replace(seaweed.origin, endpoint=proxy.endpoint)
    proxy.faults.add(Fault(status=503), times=None)
    with BlockingStore(f"s3://{s3_bucket}", origin, settings=SETTINGS.with_(request_deadline=3.0)) as store:
        began = time.monotonic()
        with pytest.raises(Throttled, match="gave up after"):
            store.get_range("k", 0, 100)
        assert time.monotonic() - began < 8


def test_lost_replies_of_writes(store: BlockingStore, proxy: CountingProxy) -> None:
    proxy.faults.add(Fault(lose_reply=True), method="PUT")
    meta = store.put("plain", b"123")
    assert store.head("plain").etag == meta.etag
    proxy.faults.add(Fault(lose_reply=True), method="PUT")
    with pytest.raises(Unavailable, match="read back"):
        store.put("claim", b"mine", if_none_match=True)
    assert bytes(store.get("claim")[1]) == b"mine"
    with pytest.raises(PreconditionFailed):
        store.put("claim", b"another's", if_none_match=True)


def test_parts_of_an_upload_that_fail(store: BlockingStore, proxy: CountingProxy) -> None:
    parts = [bytes([i]) * (5 << 20) for i in range(3)]
    proxy.faults.add(Fault(status=503), method="PUT", after=1)
    try:
        store.put_multipart("big", parts)
    except StoreError:
        # The exact backend does not repeat parts; then nothing may be left of the upload.
        assert any(r.method == "DELETE" and "uploadId" in r.query for r in proxy.requests)
        assert [m.key for page in store.list("") for m in page.objects] == ["k"]
    else:
        assert bytes(store.get("big")[1]) == b"".join(parts)


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_an_upload_whose_end_fails_within_a_success(store: BlockingStore, proxy: CountingProxy, code: str) -> None:
    """CompleteMultipartUpload may answer 200 and give an error in the body: that is no upload."""
    parts = [bytes([i]) * (5 << 20) for i in range(2)]
    proxy.faults.add(Fault(status=200, code=code), method="POST", after=1)
    try:
        store.put_multipart("big", parts)
    except StoreError:
        assert [m.key for page in store.list("") for m in page.objects] == ["k"]
    else:
        assert bytes(store.get("big")[1]) == b"".join(parts)


def test_listing_through_faults(store: BlockingStore, proxy: CountingProxy) -> None:
    for fault in (Fault(reset=True), Fault(cut_after=10), Fault(status=503), Fault(status=500)):
        proxy.faults.add(fault, method="GET")
        assert [m.key for page in store.list("") for m in page.objects] == ["k"]


def random_fault(draw: random.Random) -> Fault:
    """One of everything that a read may meet."""
    kinds: list[Callable[[], Fault]] = [
        lambda: Fault(reset=True),
        lambda: Fault(cut_after=draw.randrange(1 << 20)),
        lambda: Fault(stall_after=draw.randrange(1 << 20)),
        lambda: Fault(status=draw.choice([500, 502, 503, 504])),
        lambda: Fault(status=429, code="TooManyRequests"),
        lambda: Fault(latency=draw.random() * 1.5),
        lambda: Fault(shift_range=draw.randrange(1, 5000)),
        lambda: Fault(whole=True),
        lambda: Fault(rate=draw.uniform(5e5, 5e6)),
        lambda: Fault(etag='"x"'),
        lambda: Fault(status=403, code="AccessDenied"),
    ]
    # The last two end a read for good; they are rare, as in life.
    weights = [4] * 9 + [1] * 2
    return draw.choices(kinds, weights)[0]()


async def one_story(store: ObjectStore, draw: random.Random) -> tuple[int, int]:
    """Twelve reads at once; how many gave their bytes, and how many a typed error."""
    meta = await store.head("k")
    spans = [sorted(draw.sample(range(len(DATA) + 1), 2)) for _ in range(12)]

    async def read(start: int, end: int) -> bool:
        began = time.monotonic()
        try:
            got = await store.get_range("k", start, end, version=meta)
        except StoreError:
            return False
        finally:
            assert time.monotonic() - began < DEADLINE + 5
        assert bytes(got) == DATA[start:end]
        return True

    outcomes = await asyncio.gather(*(read(start, end) for start, end in spans))
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return sum(outcomes), len(outcomes) - sum(outcomes)


def run_story(seaweed: SeaweedServer, proxy: CountingProxy, bucket: str, backend: str, seed: int) -> tuple[int, int]:
    draw = random.Random(seed)
    proxy.faults.clear()
    with BlockingStore(f"s3://{bucket}", seaweed.origin) as owner:
        owner.put("k", DATA)
    for _ in range(12):
        proxy.faults.add(random_fault(draw), method="GET", after=draw.randrange(2))

    async def main() -> tuple[int, int]:
        origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=backend)
        async with open_store(f"s3://{bucket}", origin, settings=SETTINGS) as store:
            return await one_story(store, draw)

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_stories(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str, seed: int) -> None:
    good, _ = run_story(seaweed, proxy, s3_bucket, "obstore" if seed % 2 else "fsspec", seed)
    assert good >= 6


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_many_stories(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str) -> None:
    good = bad = 0
    for seed in range(100, 200):
        g, b = run_story(seaweed, proxy, s3_bucket, "obstore" if seed % 2 else "fsspec", seed)
        good, bad = good + g, bad + b
    assert good + bad == 1200 and good > 1000
