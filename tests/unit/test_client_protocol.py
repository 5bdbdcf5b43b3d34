"""Frames and messages: everything survives the wire, garbage never gets further than an error."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs import errors, protocol
from cachefs.config import Origin
from cachefs.errors import CacheError, ConfigError, NearflashError, NotFound
from cachefs.frames import MAX_FRAME, FrameBuffer
from cachefs.protocol import decode_reply, decode_request, encode
from cachefs.shard import ObjectStat

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
REQUESTS = st.one_of(
    st.builds(protocol.Hello, st.tuples(st.integers(0, 9)), TEXT, st.integers(0, 2**31), st.builds(Origin, TEXT)),
    st.builds(protocol.Open, TEXT, st.none() | TEXT, st.none() | st.integers(0, 2**62)),
    st.builds(protocol.Wait, st.integers(0, 2**60), st.integers(0, 2**31), st.integers(0, 2**31), st.floats(0, 60)),
    st.builds(protocol.Attach, st.integers(0, 2**60), TEXT),
    st.builds(protocol.Attachment, st.integers(0, 2**60), TEXT),
    st.builds(protocol.Release, st.lists(st.integers(0, 2**60))),
    st.builds(protocol.Prefetch, st.lists(st.builds(protocol.Item, TEXT, st.none() | TEXT))),
    st.builds(
        protocol.Plan,
        TEXT,
        TEXT,
        position=st.integers(0, 2**62),
        objects=st.lists(st.builds(protocol.Item, TEXT, TEXT, st.integers(0, 2**62))),
        uses=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**62), st.integers(0, 2**62))),
        last=st.booleans(),
    ),
    st.builds(protocol.Progress, TEXT, st.integers(-(2**62), 2**62)),
    st.builds(protocol.Pause, st.lists(TEXT)),
    st.builds(protocol.Evict, st.lists(TEXT), st.booleans()),
    st.just(protocol.Stats()),
)
KINDS = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, NearflashError)]


@given(st.lists(REQUESTS), st.lists(st.integers(1, 50), min_size=1))
def test_requests_survive_any_cutting_of_the_stream(requests: list[protocol.Request], cuts: list[int]) -> None:
    stream = b"".join(map(encode, requests))
    buffer = FrameBuffer()
    got: list[protocol.Request] = []
    at = i = 0
    while at < len(stream):
        step = cuts[i % len(cuts)]
        buffer.feed(stream[at : at + step])
        got += map(decode_request, buffer.frames())
        at, i = at + step, i + 1
    assert got == requests
    assert buffer.take_raw(10) == b""


@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_a_message_and_nothing_else(body: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            decode(body)
        except CacheError as e:
            assert "\n" not in str(e)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_crosses_as_its_own_class(kind: type[NearflashError]) -> None:
    error = kind("is wrong", url="s3://b/k", offset=7, hint="do this")
    reply = decode_reply(encode(protocol.Failed.of(error))[4:])
    assert isinstance(reply, protocol.Failed)
    again = reply.error()
    assert type(again) is kind
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", ["os", "annotations", "NoSuchClass", "", "__builtins__"])
def test_an_unknown_class_name_becomes_the_base_error(kind: str) -> None:
    assert type(protocol.Failed(kind, "text").error()) is NearflashError


def test_a_frame_beyond_the_limit_is_refused_on_both_sides() -> None:
    buffer = FrameBuffer(limit=10)
    buffer.feed((11).to_bytes(4, "little"))
    with pytest.raises(CacheError, match="a frame of 11 bytes"):
        list(buffer.frames())
    with pytest.raises(ConfigError, match="at most"):
        encode(protocol.Open("x" * (MAX_FRAME + 1)))


def test_a_url_that_is_no_unicode_is_an_error_that_shows_it() -> None:
    with pytest.raises(ConfigError, match="not valid unicode"):
        encode(protocol.Open("s3://b/\udc80"))


def test_a_page_of_the_longest_keys_fits_into_a_frame() -> None:
    stat = ObjectStat("s3://" + "b" * 63 + "/" + "k" * 1024, 2**62, '"' + "e" * 64 + '"', 2**62)
    assert len(encode(protocol.StatPage([stat] * protocol.PAGE_ITEMS))) < MAX_FRAME


def test_raw_bytes_after_a_frame_stay_apart() -> None:
    buffer = FrameBuffer()
    buffer.feed(encode(protocol.Payload(5)) + b"hello")
    body = buffer.next_frame()
    assert body is not None
    assert decode_reply(body) == protocol.Payload(5)
    assert (buffer.take_raw(3), buffer.take_raw(10)) == (b"hel", b"lo")


def test_a_newer_peers_extra_fields_are_ignored() -> None:
    import msgspec

    raw = msgspec.msgpack.encode({"t": "failed", "kind": "NotFound", "what": "gone", "severity": 3})
    reply = decode_reply(raw)
    assert isinstance(reply, protocol.Failed)
    assert type(reply.error()) is NotFound
