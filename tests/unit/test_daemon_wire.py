"""Replies to slow clients, and the room that unsent ones take."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cachefs.daemon.room import Room
from cachefs.daemon.wire import ClientGone, Wire

DATA = random.Random(1).randbytes(1 << 20)


@asynccontextmanager
async def connected(send_timeout: float) -> AsyncIterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    wire = Wire(ours, lambda why: None, send_timeout=send_timeout)
    try:
        yield wire, theirs
    finally:
        wire.close()
        theirs.close()


def test_a_client_that_reads_slowly_gets_all_however_long_it_takes() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with connected(send_timeout=1.0) as (wire, client):
            began = loop.time()
            sending = asyncio.create_task(wire.send_raw(DATA))
            got = b""
            while len(got) < len(DATA):
                await asyncio.sleep(0.1)
                got += await loop.sock_recv(client, 64 * 1024)
            await sending
            assert got == DATA
            assert loop.time() - began > 1.0, "longer than it may read nothing"

    asyncio.run(test())


def test_a_client_that_reads_nothing_is_given_up() -> None:
    async def test() -> None:
        async with connected(send_timeout=0.1) as (wire, _):
            with pytest.raises(ClientGone, match=r"it has read nothing for 0\.1 s"):
                await wire.send_raw(DATA)

    asyncio.run(test())


def test_room_is_given_in_order_and_comes_back_from_those_who_gave_up() -> None:
    async def test() -> None:
        room = Room(100)
        order: list[str] = []
        leave = {name: asyncio.Event() for name in "abcd"}

        async def hold(name: str, size: int) -> None:
            async with room.take(size):
                order.append(name)
                await leave[name].wait()

        async with asyncio.timeout(20):
            a = asyncio.create_task(hold("a", 70))
            b = asyncio.create_task(hold("b", 70))
            c = asyncio.create_task(hold("c", 10))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert order == ["a"], "a small one does not overtake"
            b.cancel()
            await asyncio.gather(b, return_exceptions=True)
            await asyncio.sleep(0)
            assert order == ["a", "c"]
            d = asyncio.create_task(hold("d", 1000))
            leave["a"].set()
            leave["c"].set()
            leave["d"].set()
            await asyncio.gather(a, c, d)
            assert order == ["a", "c", "d"], "more than all of it is taken alone"

    asyncio.run(test())
