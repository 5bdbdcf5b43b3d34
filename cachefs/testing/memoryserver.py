"""An S3 server and its client in memory, whose replies go wrong as a :class:`.faults.Fault` says.

Where :class:`.stores.FaultyStore` raises ready-made errors, this one makes wrong *replies* and lets the checks that the
real backends use (:mod:`cachefs.objstore.buffers`, :mod:`cachefs.objstore.replies`) find out. All waits are on the
clock given, so that thousands of stories take seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..clock import Clock
from ..errors import StoreError
from ..objstore.abc import Listing, ObjectMeta, ObjectStore
from ..objstore.buffers import check_range, check_version, match_tag
from ..objstore.replies import Refusal, error_for
from .faults import Fault
from .rules import FaultPlan

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RATE = 100e6
_ROUND_TRIP = 0.01


@dataclass(frozen=True)
class Asked:
    """One request as the server saw it; ``time`` by the clock."""

    method: str
    key: str
    start: int
    end: int
    time: float


class MemoryServer:
    """Objects with all their versions, one valid token, and what to do wrong.

    ``rate`` is bytes a second of one reply; every request takes ``round_trip`` seconds besides. ``issues`` says whether
    the token service gives out the token that is valid now.
    """

    def __init__(self, clock: Clock, *, rate: float = _RATE, round_trip: float = _ROUND_TRIP) -> None:
        self.clock = clock
        self.faults: FaultPlan[Fault] = FaultPlan()
        self.asked: list[Asked] = []
        self.running = 0
        self.versions: dict[str, bytes] = {}
        self.issues = True
        self.token = 1
        self._rate = rate
        self._round_trip = round_trip
        self._newest: dict[str, ObjectMeta] = {}

    def keep(self, key: str, data: bytes) -> ObjectMeta:
        """Store a new version of an object, at once."""
        etag = f'"{len(self.versions) + 1}"'
        self.versions[etag] = data
        meta = self._newest[key] = ObjectMeta(key, len(data), etag=etag)
        return meta

    def expire(self) -> None:
        """From now on the token that clients hold is refused."""
        self.token += 1

    def newest(self, key: str) -> ObjectMeta | None:
        return self._newest.get(key)

    def span_seconds(self, size: int, fault: Fault) -> float:
        return size / (fault.rate or self._rate)

    async def arrive(self, method: str, key: str, start: int, end: int) -> Fault:
        """Count a request and let the time pass that it takes to get here."""
        asked = Asked(method, key, start, end, self.clock.monotonic())
        self.asked.append(asked)
        fault = self.faults.choose(asked) or Fault()
        await self.clock.asleep(self._round_trip + fault.latency)
        return fault


class MemoryClient(ObjectStore):
    """One try per call, to be wrapped by the retry layer. ``stall``: seconds without a byte that fail a read."""

    def __init__(self, server: MemoryServer, *, stall: float, url: str = "s3://bucket") -> None:
        self.url = url
        self.renewals = 0
        self._server = server
        self._stall = stall
        self._token = server.token

    async def head(self, key: str) -> ObjectMeta:
        fault = await self._exchange("HEAD", key, 0, 0, "head")
        meta = self._server.newest(key)
        if meta is None:
            raise self._error(Refusal(404), "head", key)
        if fault.etag is not None:
            return ObjectMeta(key, meta.size, etag=fault.etag)
        return meta

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""
        self._server.running += 1
        try:
            return await self._get_range(key, start, end, version)
        finally:
            self._server.running -= 1

    async def _get_range(self, key: str, start: int, end: int, version: ObjectMeta | None) -> Buffer:
        fault = await self._exchange("GET", key, start, end, "get")
        # The reply is of the version there was when it began, whatever happens while its body is on the way.
        meta = self._server.newest(key)
        if meta is None:
            raise self._error(Refusal(404), "get", key)
        tag = match_tag(version)
        if tag is not None and tag != meta.etag:
            raise self._error(Refusal(412), "get", key, bound=True)
        if end > meta.size:
            raise self._error(Refusal(416), "get", key)
        body = self._server.versions[str(meta.etag)][start:end]
        await self._receive(body, fault, key)
        said = ObjectMeta(key, meta.size, etag=fault.etag or meta.etag)
        url = f"{self.url}/{key}"
        if fault.whole:
            raise self._error(Refusal(garbled=True, detail="no Content-Range"), "get", key)
        if version is not None:
            check_version(said, version, url=url)
        got = body + b"\0" * fault.extra
        check_range((start + fault.shift_range, end + fault.shift_range), len(got), (start, end), url=url)
        return got

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        raise NotImplementedError("this server is asked for ranges only")

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        await self._exchange("GET", prefix, 0, 0, "list")
        return Listing(()), None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        raise NotImplementedError("this server is only read from")

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        raise NotImplementedError("this server is only read from")

    async def delete(self, keys: Sequence[str]) -> None:
        raise NotImplementedError("this server is only read from")

    async def renew(self) -> bool:
        self.renewals += 1
        await asyncio.sleep(0)
        if not self._server.issues or self._token == self._server.token:
            return False
        self._token = self._server.token
        return True

    async def _exchange(self, method: str, key: str, start: int, end: int, doing: str) -> Fault:
        """What goes wrong before there is a body."""
        token = self._token
        fault = await self._server.arrive(method, key, start, end)
        if fault.reset or fault.lose_reply:
            raise self._error(Refusal(cut=True, detail="connection reset"), doing, key)
        if fault.status is not None:
            # An error in a 200 has no Content-Range, and is shorter than what was asked for.
            garbled = fault.status < 300
            refusal = Refusal(garbled=True, detail=fault.code) if garbled else Refusal(fault.status, fault.code)
            raise self._error(refusal, doing, key)
        if token != self._server.token:
            raise self._error(Refusal(400, "ExpiredToken"), doing, key)
        return fault

    async def _receive(self, body: bytes, fault: Fault, key: str) -> None:
        """Let the time of a body pass, or of as much of it as comes."""
        clock, span = self._server.clock, self._server.span_seconds
        if fault.cut_after is not None and fault.cut_after < len(body):
            await clock.asleep(span(fault.cut_after, fault))
            raise self._error(Refusal(cut=True, detail="end of file"), "get", key)
        if fault.stall_after is not None and fault.stall_after < len(body):
            await clock.asleep(span(fault.stall_after, fault) + self._stall)
            raise self._error(Refusal(stalled=True), "get", key)
        await clock.asleep(span(len(body), fault))

    def _error(self, refusal: Refusal, doing: str, key: str, *, bound: bool = False) -> StoreError:
        return error_for(refusal, doing, url=f"{self.url}/{key}", bound=bound)
