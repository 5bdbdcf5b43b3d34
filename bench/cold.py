"""Cold fill: a whole data set from the object store into the node's cache, against a plain parallel download to files.

Both use the same server, the same ranges and as many requests at a time, and write to the same disk. The daemon also
digests every chunk, keeps its quota and publishes entries that survive a crash; the plain download does nothing else.
One daemon serves all rounds, its cache emptied before each: start-up does not count on either side.
The CPU column counts this process and the daemon's, not the server's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import psutil
from obstore.store import S3Store

from cachefs.client import Client, connect
from cachefs.config import Settings
from cachefs.testing.seaweed import SeaweedServer

from .data import cold_objects, kept
from .figure import Case, Figure, Timing, stopwatch
from .sizes import Sizes

BUCKET = "bench"


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure, with a server that holds its data until the block ends."""
    files = sorted(kept(scratch / "cold", sizes, cold_objects).glob("*.bin"))
    shutil.rmtree(scratch / "s3", ignore_errors=True)
    with SeaweedServer(scratch / "s3") as server:
        server.make_bucket(BUCKET)
        store = store_of(server)
        for file in files:
            obstore.put(store, file.name, file)
        keys = [file.name for file in files]
        with daemon(server, scratch / "cache", sizes) as (client, process):
            yield Figure(
                name="cold",
                title=f"Cold fill, {sizes.cold_objects * sizes.cold_object / 1e6:.0f} MB",
                unit="MB/s",
                scale=1e-6,
                baseline="obstore to files",
                cases=(
                    Case("obstore to files", "limit", lambda: download(store, keys, scratch / "plain", sizes)),
                    Case("cachefs daemon", "ours", lambda: fill(client, process, keys)),
                ),
            )
    shutil.rmtree(scratch / "s3", ignore_errors=True)


def store_of(server: SeaweedServer) -> Any:
    """The server's bucket, for who needs no cache."""
    return S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )


def download(store: Any, keys: list[str], folder: Path, sizes: Sizes) -> Timing:
    """Ranged GETs from a thread pool, each written at its place into a preallocated file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    os.sync()

    def one(job: tuple[int, str, int]) -> int:
        fd, key, start = job
        data = obstore.get_range(store, key, start=start, length=min(sizes.cold_chunk, sizes.cold_object - start))
        return os.pwrite(fd, data, start)

    with stopwatch() as watch:
        fds = [os.open(folder / key, os.O_RDWR | os.O_CREAT, 0o600) for key in keys]
        try:
            for fd in fds:
                os.posix_fallocate(fd, 0, sizes.cold_object)
            starts = range(0, sizes.cold_object, sizes.cold_chunk)
            with ThreadPoolExecutor(sizes.cold_parallel) as pool:
                done = sum(pool.map(one, [(fd, key, at) for fd, key in zip(fds, keys, strict=True) for at in starts]))
        finally:
            for fd in fds:
                os.close(fd)
    shutil.rmtree(folder)
    return watch.timing(done)


@contextmanager
def daemon(server: SeaweedServer, folder: Path, sizes: Sizes) -> Iterator[tuple[Client, psutil.Process]]:
    """A daemon with an empty cache, and a client of it; stopped and removed at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    settings = Settings.load(
        {},
        cache_dir=folder,
        chunk_size=sizes.cold_chunk,
        transfer_bytes=sizes.cold_chunk * sizes.cold_parallel,
        origin_parallel=sizes.cold_parallel,
        origin=server.origin,
    )
    with connect(settings) as client:
        process = psutil.Process(int(client.stats()["pid"] or 0))
        try:
            yield client, process
        finally:
            client.stop_daemon()
            process.wait(30)
            shutil.rmtree(folder)


def fill(client: Client, process: psutil.Process, keys: list[str]) -> Timing:
    """Prefetch everything into the emptied cache and wait until every byte is there."""
    client.evict(None)
    if client.entries():
        raise ValueError("the cache could not be emptied")
    os.sync()
    before = _fetched(client)
    with stopwatch(process) as watch:
        done = _fill(client, [f"s3://{BUCKET}/{key}" for key in keys])
    if _fetched(client) - before != done:
        raise ValueError(f"the daemon fetched {_fetched(client) - before} bytes for a data set of {done}")
    return watch.timing(done)


def _fetched(client: Client) -> int:
    return int(client.stats().get("origin_get_bytes") or 0)


def _fill(client: Client, urls: list[str]) -> int:
    client.prefetch(urls)
    done = 0
    for url in urls:
        shard = client.open(url)
        done += len(shard.view())
        shard.close()
    return done
