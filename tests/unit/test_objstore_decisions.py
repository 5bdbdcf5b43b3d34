"""The pure parts of object-store access: presets, error mapping, pauses, the window, key routing, checks."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.config import Origin
from cachefs.errors import (
    Changed,
    ClockSkewed,
    ConfigError,
    Corrupt,
    Denied,
    NotFound,
    PreconditionFailed,
    Stalled,
    StoreError,
    Throttled,
    Unavailable,
)
from cachefs.objstore.abc import ObjectMeta
from cachefs.objstore.backoff import Failure, RetryPolicy, attempt_limit, backoff, next_pause
from cachefs.objstore.buffers import as_pieces, check_range, check_version, match_tag, parse_content_range
from cachefs.objstore.limiter import Window
from cachefs.objstore.presets import PRESETS, resolve
from cachefs.objstore.replies import CredentialsExpired, CredentialsRefused, Refusal, error_for, shorten
from cachefs.objstore.route import is_plain, is_plain_file, is_plain_url
from cachefs.testing.strategies import ODD_KEYS, SPECIAL_NAMES, keys, plain_keys

# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "bucket", "endpoint", "virtual"),
    [
        (Origin(), "b", "https://b.s3.us-east-1.amazonaws.com", True),
        (Origin(region="cn-north-1"), "b", "https://b.s3.cn-north-1.amazonaws.com.cn", True),
        (Origin(region="eu-west-1"), "dotted.bucket", "https://s3.eu-west-1.amazonaws.com", False),
        (Origin(endpoint="http://127.0.0.1:9000"), "b", "http://127.0.0.1:9000", False),
        (Origin(endpoint="http://127.0.0.1:9000/"), "b", "http://127.0.0.1:9000", False),
        (Origin(endpoint="http://10.0.0.1:9000", addressing="virtual"), "b", "http://b.10.0.0.1:9000", True),
        (Origin(addressing="path"), "b", "https://s3.us-east-1.amazonaws.com", False),
        (Origin(preset="minio", endpoint="https://minio.lan"), "b", "https://minio.lan", False),
        (Origin(preset="aliyun"), "b", "https://b.s3.oss-cn-hangzhou.aliyuncs.com", True),
        (Origin(preset="aliyun", region="cn-beijing"), "b", "https://b.s3.oss-cn-beijing.aliyuncs.com", True),
        (Origin(preset="aliyun", endpoint="http://oss.vpc.lan"), "b", "http://b.oss.vpc.lan", True),
        (Origin(endpoint="https://oss-cn-shanghai.aliyuncs.com"), "b", "https://b.oss-cn-shanghai.aliyuncs.com", True),
        (Origin(preset="huawei"), "b", "https://b.obs.cn-north-4.myhuaweicloud.com", True),
        (Origin(preset="huawei"), "my.bucket", "https://obs.cn-north-4.myhuaweicloud.com", False),
        (Origin(preset="ksyun"), "b", "https://b.ks3-cn-beijing.ksyuncs.com", True),
        (Origin(preset="tencent", region="ap-shanghai"), "b-1", "https://b-1.cos.ap-shanghai.myqcloud.com", True),
        (Origin(preset="gcs"), "b", "https://storage.googleapis.com", False),
        (Origin(endpoint="https://acc.r2.cloudflarestorage.com"), "b", "https://acc.r2.cloudflarestorage.com", False),
        (Origin(endpoint="https://s3.eu-west-1.amazonaws.com"), "b", "https://b.s3.eu-west-1.amazonaws.com", True),
        (Origin(endpoint="https://evilamazonaws.com"), "b", "https://evilamazonaws.com", False),
        (Origin(preset="aws", endpoint="https://s3.gateway.lan"), "b", "https://s3.gateway.lan", False),
        (Origin(preset="huawei"), "my.bucket", "https://obs.cn-north-4.myhuaweicloud.com", False),
        (Origin(preset="ksyun", region="cn-shanghai"), "my.bucket", "https://ks3-cn-shanghai.ksyuncs.com", False),
        (Origin(preset="gcs"), "my.bucket", "https://storage.googleapis.com", False),
        (Origin(preset="seaweedfs", endpoint="http://w:8333"), "my.bucket", "http://w:8333", False),
        (
            Origin(preset="r2", endpoint="https://a.eu.r2.cloudflarestorage.com"),
            "b",
            "https://a.eu.r2.cloudflarestorage.com",
            False,
        ),
        (
            Origin(endpoint="https://obs.eu-west-101.myhuaweicloud.eu"),
            "b",
            "https://b.obs.eu-west-101.myhuaweicloud.eu",
            True,
        ),
        (
            Origin(endpoint="https://s3.cn-north-1.amazonaws.com.cn"),
            "b",
            "https://b.s3.cn-north-1.amazonaws.com.cn",
            True,
        ),
        (Origin(endpoint="https://evilstorage.googleapis.com"), "b", "https://evilstorage.googleapis.com", False),
    ],
)
def test_where_a_bucket_is(origin: Origin, bucket: str, endpoint: str, virtual: bool) -> None:
    access = resolve(origin, bucket)
    assert access.bucket_endpoint(bucket) == endpoint
    assert access.virtual is virtual


@pytest.mark.parametrize(
    ("origin", "region"),
    [
        (Origin(), "us-east-1"),
        (Origin(endpoint="https://s3.amazonaws.com"), "us-east-1"),
        (Origin(endpoint="https://s3.eu-west-1.amazonaws.com"), "eu-west-1"),
        (Origin(endpoint="https://s3.dualstack.us-gov-west-1.amazonaws.com"), "us-gov-west-1"),
        (Origin(endpoint="https://s3.cn-northwest-1.amazonaws.com.cn"), "cn-northwest-1"),
        (Origin(endpoint="https://s3.eu-west-1.amazonaws.com", region="eu-west-2"), "eu-west-2"),
        (Origin(endpoint="https://s3.oss-cn-shanghai.aliyuncs.com"), "cn-shanghai"),
        (Origin(endpoint="https://s3.oss-cn-wulanchabu-internal.aliyuncs.com"), "cn-wulanchabu"),
        (Origin(endpoint="https://oss-us-west-1.aliyuncs.com"), "us-west-1"),
        (Origin(endpoint="https://s3.oss-accelerate-overseas.aliyuncs.com"), "cn-hangzhou"),
        (Origin(endpoint="https://obs.ap-southeast-1.myhuaweicloud.com"), "ap-southeast-1"),
        (Origin(endpoint="https://obs.eu-west-101.myhuaweicloud.eu"), "eu-west-101"),
        (Origin(endpoint="https://ks3-cn-beijing-internal.ksyuncs.com"), "cn-beijing"),
        (Origin(endpoint="https://cos.ap-singapore.myqcloud.com"), "ap-singapore"),
        (Origin(endpoint="https://cos-internal.ap-beijing.tencentcos.cn"), "ap-beijing"),
        (Origin(endpoint="https://acc.r2.cloudflarestorage.com"), "auto"),
        (Origin(preset="gcs"), "auto"),
        (Origin(preset="minio", endpoint="https://s3.eu-west-1.lan"), "us-east-1"),
        (Origin(endpoint="http://127.0.0.1:9000"), "us-east-1"),
    ],
    ids=str,
)
def test_the_region_is_that_of_the_endpoint(origin: Origin, region: str) -> None:
    assert resolve(origin, "b").region == region


def test_azure_has_a_scheme_of_its_own() -> None:
    for origin in (Origin(preset="azure"), Origin(endpoint="https://acc.blob.core.windows.net")):
        with pytest.raises(ConfigError, match="az://"):
            resolve(origin, "b")


def test_every_preset_says_where_its_rules_are_from() -> None:
    assert set(PRESETS) == {"aws", "aliyun", "huawei", "ksyun", "tencent", "minio", "seaweedfs", "r2", "gcs", "azure"}
    for preset in PRESETS.values():
        assert "https://" in preset.source


def test_every_preset_resolves_or_says_what_it_needs() -> None:
    for name in PRESETS:
        try:
            access = resolve(Origin(preset=name, region="some-region"), "b")
        except ConfigError as e:
            assert "AWS_ENDPOINT_URL" in str(e) or "az://" in str(e)
        else:
            assert access.region == "some-region"
            assert access.endpoint.startswith("https://")


@pytest.mark.parametrize(
    "origin", [Origin(preset="nimbus"), Origin(addressing="sideways"), Origin(endpoint="localhost:9000")], ids=str
)
def test_settings_that_cannot_work(origin: Origin) -> None:
    with pytest.raises(ConfigError):
        resolve(origin, "b")


# --- error mapping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "doing", "kind", "says"),
    [
        (Refusal(404, "NoSuchKey"), "get", NotFound, "no such object"),
        (Refusal(404, None), "head", NotFound, "no such object"),
        (Refusal(404, "NoSuchBucket"), "put", NotFound, "no such bucket"),
        (Refusal(403, None), "head", Denied, "missing or not allowed"),
        (Refusal(403, "AccessDenied"), "get", Denied, "missing or not allowed"),
        (Refusal(403, "AccessDenied"), "list", Denied, "s3:ListBucket"),
        (Refusal(403, "AccessDenied"), "put", Denied, "s3:PutObject"),
        (Refusal(403, "SignatureDoesNotMatch"), "get", CredentialsRefused, "AWS_SECRET_ACCESS_KEY"),
        (Refusal(403, "InvalidAccessKeyId"), "list", CredentialsRefused, "does not know the access key"),
        (Refusal(403, "RequestTimeTooSkewed"), "get", ClockSkewed, "clock"),
        (Refusal(403, "ExpiredToken"), "get", CredentialsExpired, "expired"),
        (Refusal(400, "ExpiredToken"), "get", CredentialsExpired, "expired"),
        (Refusal(401, None, "no token"), "get", CredentialsRefused, "no credentials that the store accepts: no token"),
        (Refusal(412, "PreconditionFailed"), "put", PreconditionFailed, "state"),
        (Refusal(409, "ConditionalRequestConflict"), "put", PreconditionFailed, "state"),
        (Refusal(416, "InvalidRange"), "get", Changed, "shorter"),
        (Refusal(503, "SlowDown"), "get", Throttled, "SlowDown"),
        (Refusal(429, None), "get", Throttled, "429"),
        (Refusal(500, "InternalError"), "get", Unavailable, "500"),
        (Refusal(502, None), "get", Unavailable, "502"),
        (Refusal(301, "PermanentRedirect"), "get", StoreError, "AWS_REGION"),
        (Refusal(400, "AuthorizationHeaderMalformed"), "get", StoreError, "AWS_REGION"),
        (Refusal(400, "InvalidArgument", "no such thing"), "put", StoreError, "400 InvalidArgument no such thing"),
        (Refusal(cut=True, detail="Connection refused"), "get", Unavailable, "Connection refused"),
        (Refusal(stalled=True), "get", Stalled, "no answer"),
        (Refusal(garbled=True, detail="not partial"), "get", Corrupt, "not partial"),
    ],
)
def test_one_error_for_each_situation(refusal: Refusal, doing: str, kind: type[StoreError], says: str) -> None:
    error = error_for(refusal, doing, url="s3://b/k")
    assert type(error) is kind
    assert says in str(error) and str(error).startswith("s3://b/k: ")
    assert type(pickle.loads(pickle.dumps(error))) is kind


def test_the_way_out_is_that_of_the_cloud() -> None:
    for url, variable in (("gs://b/k", "GOOGLE_"), ("az://b/k", "AZURE_"), ("s3://b/k", "AWS_"), ("s3a://b", "AWS_")):
        assert variable in str(error_for(Refusal(401), "get", url=url))


def test_a_skewed_clock_is_not_called_denied_or_missing() -> None:
    text = str(error_for(Refusal(403, "RequestTimeTooSkewed"), "get", url="s3://b/k"))
    assert "denied" not in text and "missing" not in text and "allowed" not in text


def test_a_failed_condition_of_a_bound_read_means_that_the_object_changed() -> None:
    assert type(error_for(Refusal(412), "get", url="s3://b/k", bound=True)) is Changed


@given(st.integers(300, 599) | st.none(), st.text(max_size=30) | st.none(), st.text(max_size=3000), st.booleans())
def test_every_refusal_is_one_line(status: int | None, code: str | None, detail: str, cut: bool) -> None:
    for doing in ("head", "get", "list", "put", "delete"):
        error = error_for(Refusal(status, code, detail, cut=cut), doing, url="s3://b/k")
        assert "\n" not in str(error) and len(str(error)) < 600


# --- pauses -----------------------------------------------------------------------------------------------------------

POLICY = RetryPolicy()


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_bounded_and_never_nothing(tries: int, draw: float) -> None:
    pause = backoff(tries, draw, POLICY)
    assert 0.01 <= pause <= POLICY.cap


@given(st.floats(0, 1, exclude_max=True))
def test_pauses_grow(draw: float) -> None:
    assert backoff(1, draw, POLICY) <= 0.1
    assert all(backoff(n, draw, POLICY) <= backoff(n + 1, draw, POLICY) for n in range(1, 20))


ERRORS = st.sampled_from(
    [NotFound("x"), Denied("x"), Changed("x"), Corrupt("x"), Throttled("x"), Unavailable("x"), Stalled("x")]
)


@given(ERRORS, st.integers(1, 50), st.floats(0, 400), st.booleans(), st.booleans(), st.floats(0, 1, exclude_max=True))
def test_when_to_try_again(
    error: StoreError, tries: int, elapsed: float, answered: bool, repeatable: bool, draw: float
) -> None:
    pause = next_pause(Failure(error, tries, elapsed, answered, repeatable), draw, POLICY)
    if isinstance(error, NotFound | Denied | Changed):
        assert pause is None
    if not repeatable and not isinstance(error, Throttled):
        assert pause is None
    if pause is not None:
        assert elapsed + pause < POLICY.deadline
    elif isinstance(error, Throttled) or (isinstance(error, Unavailable) and repeatable and answered):
        assert elapsed + POLICY.cap >= POLICY.deadline


@given(st.floats(0, 300), st.integers(0, 1 << 40))
def test_a_try_never_outlasts_the_request(remaining: float, size: int) -> None:
    assert attempt_limit(remaining, None, POLICY) == remaining
    assert attempt_limit(remaining, size, POLICY) <= remaining


# --- the window -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.lists(st.sampled_from(["ok", "throttled"]), max_size=300))
def test_the_window_stays_in_bounds_and_falls_once_per_round(ceiling: int, events: list[str]) -> None:
    window = Window(ceiling)
    now = 0.0
    for event in events:
        now += 1
        before = window.size
        if event == "ok":
            window.succeeded()
            assert before <= window.size <= before + 1
        else:
            window.throttled(started=now - 0.5, now=now)
            window.throttled(started=now - 0.5, now=now + 0.1)  # one that was under way at the same time
            assert window.size >= max(1, before // 2)
        assert 1 <= window.size <= ceiling


def test_the_window_recovers() -> None:
    window = Window(16)
    for now in range(10):
        window.throttled(now, now + 0.5)
    assert window.size == 1
    for _ in range(500):
        window.succeeded()
    assert window.size == 16


# --- routing ----------------------------------------------------------------------------------------------------------


@given(keys())
def test_what_is_plain_survives_as_a_path(key: str) -> None:
    parts = key.split("/")
    assert is_plain(key) == all(part not in {"", ".", ".."} for part in parts)


@given(plain_keys())
def test_obstore_takes_plain_keys_as_they_are(key: str) -> None:
    import obstore
    from obstore.store import MemoryStore

    store = MemoryStore()
    obstore.put(store, key, b"1", use_multipart=False)
    assert [o["path"] for o in obstore.list(store).collect()] == [key]


def test_examples_of_routing() -> None:
    assert all(map(is_plain, SPECIAL_NAMES))
    assert not any(map(is_plain, ODD_KEYS))
    assert not is_plain("a\nb") and not is_plain("del\x7f") and not is_plain("lone\udcff")
    assert (
        is_plain_file("/a/b") and not is_plain_file("/a//b") and not is_plain_file("/a/x#1") and not is_plain_file("a")
    )
    assert is_plain_url("a/b%20c") and not is_plain_url("a?x=1") and not is_plain_url("a/#frag")


# --- checks -----------------------------------------------------------------------------------------------------------


def test_versions_are_compared_by_what_both_sides_know() -> None:
    old = ObjectMeta("k", 5, etag='"a"', modified=1.0)
    check_version(ObjectMeta("k", 5, etag='"a"', modified=2.0), old, url="u")
    check_version(ObjectMeta("k", 5, modified=1.0), ObjectMeta("k", 5, modified=1.0), url="u")
    check_version(ObjectMeta("k", 5, version_id="v"), ObjectMeta("k", 5, version_id="v"), url="u")
    for other in (
        ObjectMeta("k", 5, etag='"b"', modified=1.0),
        ObjectMeta("k", 6, etag='"a"', modified=1.0),
        ObjectMeta("k", 5, modified=2.0),
    ):
        with pytest.raises(Changed):
            check_version(other, old, url="u")


def test_only_a_strong_tag_can_be_matched() -> None:
    assert match_tag(ObjectMeta("k", 1, etag='"a"')) == '"a"'
    assert match_tag(ObjectMeta("k", 1, etag='W/"a"')) is None
    assert match_tag(ObjectMeta("k", 1)) is None and match_tag(None) is None


def test_ranges_are_checked() -> None:
    check_range((3, 10), 7, (3, 10), url="u")
    for got, length in (((3, 9), 6), ((0, 10), 7), ((3, 10), 6)):
        with pytest.raises(Corrupt, match="asked for"):
            check_range(got, length, (3, 10), url="u")


def test_only_wrong_replies_count_against_wrong_replies() -> None:
    late = Failure(Corrupt("x"), 12, 5.0, True, True, wrong=1)
    assert next_pause(late, 0.5, POLICY) is not None, "eleven other failures went before it"
    assert next_pause(replace(late, wrong=POLICY.corrupt_tries), 0.5, POLICY) is None


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 40), st.integers(1, 1 << 60))
def test_content_range(start: int, length: int, size: int) -> None:
    assert parse_content_range(f"bytes {start}-{start + length - 1}/{size}") == (start, start + length, size)


@pytest.mark.parametrize("value", [None, "", "bytes */10", "bytes 1-2", "items 1-2/3", "bytes 1-2/3 "])
def test_content_ranges_that_are_none(value: str | None) -> None:
    assert parse_content_range(value) is None


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_pieces_are_views(parts: list[bytes]) -> None:
    pieces = as_pieces(parts)
    assert b"".join(pieces) == b"".join(parts)
    assert all(piece.obj in parts and piece.format == "B" for piece in pieces)
    assert [bytes(p) for p in as_pieces(b"abc")] == [b"abc"]


def test_a_url_in_a_message_keeps_its_end() -> None:
    text = 'Could not connect to the endpoint URL: "https://sts.host/?Action=AssumeRole&Token=' + "x" * 300 + '" at all'
    assert shorten(text) == 'Could not connect to the endpoint URL: "https://sts.host/" at all'
