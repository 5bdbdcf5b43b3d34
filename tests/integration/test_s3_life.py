"""What a store holds while it lives, and that it gives all of it back."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cachefs.objstore import open_store
from cachefs.testing.faults import Fault
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]

BACKENDS = ("obstore", "fsspec", "auto")


async def use(bucket: str, seaweed: SeaweedServer, proxy: CountingProxy, backend: str) -> None:
    """A bit of everything, a broken connection and cancelled calls among it."""
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=backend)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield bytes(5 << 20)

    async with open_store(f"s3://{bucket}", origin) as store:
        await store.put("k", bytes(2 << 20))
        meta = await store.head("k")
        proxy.faults.add(Fault(cut_after=1000), method="GET")
        assert memoryview(await store.get_range("k", 0, meta.size, version=meta)).nbytes == meta.size
        await store.put_multipart("big", parts())
        assert len([m async for page in store.list("") for m in page.objects]) == 2
        proxy.faults.add(Fault(latency=30), method="GET")
        hanging = asyncio.create_task(store.get("k"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.wait({hanging})
        await store.delete(["k", "big"])
    assert asyncio.all_tasks() == {asyncio.current_task()}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_open(seaweed: SeaweedServer, s3_bucket: str, backend: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with CountingProxy(seaweed.endpoint) as proxy:
            asyncio.run(use(s3_bucket, seaweed, proxy, backend))  # imports, runtime threads, caches
        gc.collect()
        before, threads = open_files(), threading.active_count()
        for _ in range(3):
            with CountingProxy(seaweed.endpoint) as proxy:
                asyncio.run(use(s3_bucket, seaweed, proxy, backend))
        gc.collect()
        until = time.monotonic() + 20
        while open_files() > before:  # the native client closes its connections in its own threads
            assert time.monotonic() < until, f"{open_files() - before} descriptors more than before"
            time.sleep(0.05)
    assert threading.active_count() <= threads
    leaks = [str(w.message) for w in seen if issubclass(w.category, ResourceWarning | RuntimeWarning)]
    assert leaks == []


def test_a_read_is_not_copied(seaweed: SeaweedServer, s3_bucket: str) -> None:
    async def main() -> None:
        async with open_store(f"s3://{s3_bucket}", seaweed.origin) as store:
            await store.put("k", bytes(range(256)) * 4096)
            got = await store.get_range("k", 0, 1 << 20, version=await store.head("k"))
            view = memoryview(got)
            assert type(got).__module__.startswith("obstore"), "the native client's own buffer is handed on"
            assert view.readonly and view.contiguous and view.nbytes == 1 << 20

    asyncio.run(main())
