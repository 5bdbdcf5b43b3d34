"""The moving parts of object-store access one by one: tasks, limiter, uploads in parts, errors of the libraries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError
from obstore import exceptions as obx

from cachefs.clock import SYSTEM_CLOCK
from cachefs.errors import Stalled
from cachefs.objstore import fsspec_backend, obstore_errors, s3fs_errors
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.multipart import upload_parts, watched_upload
from cachefs.objstore.replies import Refusal
from cachefs.objstore.tasks import all_of, within
from cachefs.testing.clock import TimerClock

MIB = 1 << 20


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_within_gives_the_result_or_a_timeout_and_leaves_nothing() -> None:
    async def main() -> None:
        async def quick() -> int:
            return 7

        ended = []

        async def slow() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append("slow")

        assert await within(SYSTEM_CLOCK, 10, quick()) == 7
        with pytest.raises(TimeoutError):
            await within(SYSTEM_CLOCK, 0.01, slow())
        task = asyncio.create_task(within(SYSTEM_CLOCK, 100, slow()))
        await turns()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and ended == ["slow", "slow"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_all_of_stops_at_the_first_error() -> None:
    async def main() -> None:
        running, most, done = 0, 0, []

        async def job(i: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await turns(i + 1)
                if i == 5:
                    raise LookupError("five")
                done.append(i)
                return i
            finally:
                running -= 1

        assert await all_of([lambda i=i: job(i) for i in range(5)], at_once=2) == [0, 1, 2, 3, 4]
        assert most == 2
        done.clear()
        with pytest.raises(LookupError, match="five"):
            await all_of([lambda i=i: job(i) for i in (0, 5, 50, 51)], at_once=3)
        assert done == [0] and running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# --- the limiter ------------------------------------------------------------------------------------------------------


def test_slots_are_given_in_order_and_cancelling_gives_up_the_place() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        order: list[int] = []

        async def user(i: int) -> None:
            async with limiter.slot():
                order.append(i)
                await turns(3)

        users = [asyncio.create_task(user(i)) for i in range(5)]
        await turns(1)
        users[2].cancel()
        await asyncio.wait(users)
        assert order == [0, 1, 3, 4]
        assert limiter.busy == 0

    asyncio.run(main())


def test_a_slot_that_comes_at_the_moment_of_cancelling_is_passed_on() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        got = []

        async def user(name: str) -> None:
            async with limiter.slot():
                got.append(name)

        async with limiter.slot():
            first, second = asyncio.create_task(user("first")), asyncio.create_task(user("second"))
            await turns()
        first.cancel()  # its slot has been handed over, but it has not run yet
        await asyncio.wait({first, second})
        assert first.cancelled() and got == ["second"] and limiter.busy == 0

    asyncio.run(main())


def test_a_smaller_window_lets_fewer_in() -> None:
    async def main() -> None:
        limiter = Limiter(4)
        limiter.window.throttled(1, 2)
        inside, most = 0, 0

        async def user() -> None:
            nonlocal inside, most
            async with limiter.slot():
                inside += 1
                most = max(most, inside)
                await turns(2)
                inside -= 1

        await asyncio.gather(*(user() for _ in range(10)))
        assert most == 2

    asyncio.run(main())


# --- uploads in parts -------------------------------------------------------------------------------------------------


class FakeUpload:
    """Stands for a multipart upload; ``fail_at`` is the number of a part that is refused."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.sent: dict[int, bytes] = {}
        self.fail_at = fail_at
        self.running = 0
        self.most_running = 0
        self.completed: Sequence[int] | None = None
        self.aborted = 0

    async def send(self, number: int, pieces: Sequence[memoryview]) -> int:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await turns(60)
            if number == self.fail_at:
                raise LookupError(f"part {number} refused")
            self.sent[number] = b"".join(pieces)
            return number
        finally:
            self.running -= 1

    async def complete(self, numbers: Sequence[int]) -> str:
        self.completed = list(numbers)
        return "done"

    async def abort(self) -> None:
        assert self.running == 0, "aborted while parts were still being sent"
        self.aborted += 1

    async def run(self, parts: AsyncIterator[bytes], concurrency: int = 3) -> tuple[int, str]:
        return await upload_parts(parts, self.send, self.complete, self.abort, concurrency=concurrency)


async def stream(*sizes: int, error: Exception | None = None) -> AsyncIterator[bytes]:
    for i, size in enumerate(sizes):
        yield bytes([i]) * size
    if error is not None:
        raise error


def test_small_buffers_are_gathered_into_parts_that_s3_allows() -> None:
    async def main() -> None:
        upload = FakeUpload()
        sizes = [MIB] * 12 + [6 * MIB, 1]
        assert await upload.run(stream(*sizes)) == (sum(sizes), "done")
        assert [len(upload.sent[n]) for n in (1, 2, 3, 4)] == [5 * MIB, 5 * MIB, 8 * MIB, 1]
        assert upload.completed == [1, 2, 3, 4]
        assert upload.most_running == 3 and upload.aborted == 0

    asyncio.run(main())


def test_no_parts_make_an_empty_object() -> None:
    async def main() -> None:
        upload = FakeUpload()
        assert await upload.run(stream()) == (0, "done")
        assert upload.sent == {1: b""}

    asyncio.run(main())


@pytest.mark.parametrize("fail_at", [1, 4, 8])
def test_a_refused_part_aborts(fail_at: int) -> None:
    async def main() -> None:
        upload = FakeUpload(fail_at)
        with pytest.raises(LookupError, match=f"part {fail_at} refused"):
            await upload.run(stream(*[5 * MIB] * 8))
        assert upload.aborted == 1 and upload.completed is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_failed_source_aborts_and_a_failed_abort_is_told() -> None:
    async def main() -> None:
        upload = FakeUpload()

        async def refuse() -> None:
            raise LookupError("cannot abort")

        with pytest.raises(RuntimeError, match="the source broke") as caught:
            await upload_parts(
                stream(5 * MIB, error=RuntimeError("the source broke")),
                upload.send,
                upload.complete,
                refuse,
                concurrency=2,
            )
        assert caught.value.__notes__ == ["the upload could not be aborted: cannot abort"]

    asyncio.run(main())


def test_a_cancelled_upload_aborts() -> None:
    async def main() -> None:
        upload = FakeUpload()

        async def endless() -> AsyncIterator[bytes]:
            yield b"x" * 5 * MIB
            await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(upload.run(endless()))
        await turns()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() and upload.aborted == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_an_upload_without_progress_is_given_up() -> None:
    async def main() -> None:
        clock = TimerClock()

        async def taking(parts: AsyncIterator[memoryview]) -> Any:
            async for _ in parts:
                await clock.asleep(50)  # slow, but it moves
            await asyncio.get_running_loop().create_future()  # and then it does not any more

        began = clock.monotonic()
        with pytest.raises(Stalled, match="no progress in 60 s"):
            await clock.drive(
                watched_upload(taking, stream(1, 1, 1), clock=clock, idle=60, url="s3://b/k")  # type: ignore[arg-type]
            )
        assert clock.monotonic() - began == 160

    asyncio.run(main())


# --- what the libraries' exceptions mean ------------------------------------------------------------------------------

# As obstore 0.12 words them; shortened in the middle.
CONNECT = """Generic S3 error: Error performing GET http://127.0.0.1:1/k in 463.87µs - HTTP error: error sending request

Debug source:
Generic {
    store: "S3",
    source: RetryError(
        RetryErrorImpl {
            uri: Some(
                http://127.0.0.1:1/data/k,
            ),
            inner: Http(
                HttpError {
                    kind: Connect,
                    source: reqwest::Error {
                        source: ConnectError("tcp connect error", Os { code: 111, message: "Connection refused" }),
"""
TIMED_OUT = """Generic S3 error: HTTP error: request or response body error

Debug source:
Generic {
    store: "S3",
    source: HttpError {
        kind: Timeout,
        source: reqwest::Error {
            kind: Body,
            source: TimedOut,
"""
STATUS = """Error performing GET http://h/b/{key} in 1ms - Server returned non-2xx status code: {status} X: {body}

Debug source:
Generic {{
    store: "S3",
"""
TOKEN = """Error performing GET http://169.254.169.254/ in 1ms - Server returned non-2xx status code: 403

Debug source:
Generic {
    store: "GCS",
    source: TokenRequest {
"""
XML = "<Error><Code>{code}</Code><Message>in its own words</Message></Error>"


def generic(status: int, code: str, key: str = "k") -> obx.GenericError:
    return obx.GenericError(STATUS.format(status=status, key=key, body=XML.format(code=code)))


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (obx.GenericError(CONNECT), Refusal(cut=True, detail="Connection refused")),
        (obx.GenericError(TIMED_OUT), Refusal(stalled=True)),
        (generic(503, "SlowDown"), Refusal(503, "SlowDown")),
        (generic(416, "InvalidRange"), Refusal(416, "InvalidRange")),
        (generic(400, "ExpiredToken"), Refusal(400, "ExpiredToken")),
        (
            FileNotFoundError("Object at location k not found: " + XML.format(code="NoSuchBucket")),
            Refusal(404, "NoSuchBucket"),
        ),
        (obx.AlreadyExistsError("Object at location k already exists"), Refusal(412)),
        (obx.PreconditionError("Request precondition failure for path k"), Refusal(412)),
        (
            obx.PermissionDeniedError("lacked privileges: " + XML.format(code="AccessDenied")),
            Refusal(403, "AccessDenied"),
        ),
        (obx.UnauthenticatedError("lacked valid authentication credentials"), Refusal(401)),
        (obx.GenericError("Requested 1..2\n\nDebug source:\n source: UnexpectedRange {"), Refusal(garbled=True)),
        (obx.GenericError("non-partial\n\nDebug source:\n    source: NotPartial,"), Refusal(garbled=True)),
        (obx.GenericError("Received redirect\n\nDebug source:\n     inner: BareRedirect,"), Refusal(301)),
        (obx.GenericError("Generic LocalFileSystem error: x\n source: StartTooLarge {"), Refusal(416)),
        (obx.GenericError("Generic LocalFileSystem error: Not a directory (os error 20)"), Refusal(404)),
        (obx.GenericError("Generic LocalFileSystem error: Permission denied (os error 13)"), Refusal(403)),
        (obx.GenericError(TOKEN), Refusal(401)),
        (obx.InvalidPathError("Encountered object with invalid path"), Refusal(400)),
        (NotImplementedError("Operation `put_opts` not yet implemented"), Refusal(400)),
        (obx.GenericError("something quite new"), Refusal(cut=True)),
        # Names of keys that look like reasons.
        (obx.GenericError('Debug source:\n path: "kind: Timeout,",\n'), Refusal(cut=True)),
        (generic(503, "SlowDown", key="source:%20NotPartial,"), Refusal(503, "SlowDown")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_obstores_exceptions(error: Exception, refusal: Refusal) -> None:
    assert isinstance(error, obstore_errors.OBSTORE_ERRORS)
    got = obstore_errors.refusal_of(error)
    assert (got.status, got.code) == (refusal.status, refusal.code)
    assert (got.cut, got.stalled, got.garbled) == (refusal.cut, refusal.stalled, refusal.garbled)
    if refusal.detail:
        assert got.detail == refusal.detail


def _client_error(status: int, code: str) -> ClientError:
    reply = {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(reply, "GetObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (_client_error(404, "NoSuchKey"), Refusal(404, "NoSuchKey", "words")),
        (_client_error(403, "403"), Refusal(403, None, "words")),
        (EndpointConnectionError(endpoint_url="http://h"), Refusal(cut=True)),
        (ReadTimeoutError(endpoint_url="http://h"), Refusal(stalled=True)),
        (TimeoutError("socket"), Refusal(stalled=True)),
        (ConnectionResetError("reset"), Refusal(cut=True)),
        (ValueError("no such parameter"), Refusal(400, "ValueError")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_s3_clients_exceptions(error: Exception, refusal: Refusal) -> None:
    assert isinstance(error, s3fs_errors.S3FS_ERRORS)
    got = s3fs_errors.refusal_of(error)
    assert (got.status, got.code, got.cut, got.stalled) == (refusal.status, refusal.code, refusal.cut, refusal.stalled)


@pytest.mark.parametrize(
    ("error", "status", "cut"),
    [
        (FileNotFoundError("x"), 404, False),
        (IsADirectoryError("x"), 404, False),
        (PermissionError("x"), 403, False),
        (FileExistsError("x"), 412, False),
        (ConnectionResetError("x"), None, True),
        (RuntimeError("x"), 400, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_file_systems_exceptions(error: Exception, status: int | None, cut: bool) -> None:
    got = fsspec_backend.refusal_of(error)
    assert (got.status, got.cut) == (status, cut)
