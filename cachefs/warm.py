"""Bringing objects into the cache and waiting for them: the work behind ``cachefs warm``."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .client import Client
from .errors import CacheFull, NearflashError, NotFound
from .selection import select
from .shard import ObjectStat

_STEP = 8 << 20
_PARALLEL = 8


@dataclass
class WarmReport:
    """Objects and bytes that are in the cache now, and what could not be brought in."""

    objects: int = 0
    bytes: int = 0
    failures: list[NearflashError] = field(default_factory=list)


def expand(client: Client, urls: Iterable[str]) -> list[ObjectStat]:
    """The objects that these URLs select, each once, in order. Raises ``NotFound`` for one that selects nothing."""
    found: dict[str, ObjectStat] = {}
    for selection in map(select, urls):
        if selection.folder is None:
            items = [client.stat(selection.text)]
        else:
            items = [item for item in client.list(selection.folder) if selection.matches(item.url)]
            if not items:
                raise NotFound("no object is there", url=selection.text)
        found.update((item.url, item) for item in items)
    return list(found.values())


def warm(client: Client, items: list[ObjectStat], advance: Callable[[int], None]) -> WarmReport:
    """Fetch ``items`` and return when all are cached or have failed. ``advance`` is told bytes as they arrive.

    Raises :class:`CacheFull` before anything is fetched if all of them together exceed the quota.
    """
    total = sum(item.size for item in items)
    quota = client.stats().get("quota_bytes")
    if isinstance(quota, int) and total > quota:
        what = f"{len(items)} objects of {total} bytes together do not fit into the quota of {quota} bytes"
        raise CacheFull(what, url=items[0].url, hint="raise the quota or warm fewer")
    report = WarmReport()

    # Daemon threads, not a pool: an interrupt ends the command at once, whatever they are still waiting for.
    todo: queue.SimpleQueue[tuple[int, ObjectStat] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
    for entry in (*enumerate(items), *[None] * _PARALLEL):
        todo.put(entry)
    for _ in range(min(_PARALLEL, len(items))):
        threading.Thread(target=_work, args=(client, todo, done, advance), daemon=True).start()
    ended = sorted((done.get() for _ in items), key=lambda pair: pair[0])
    for number, error in ended:
        if error is None:
            report.objects += 1
            report.bytes += items[number].size
        elif isinstance(error, NearflashError):
            report.failures.append(error)
        else:
            raise error
    return report


def _work(
    client: Client,
    todo: queue.SimpleQueue[tuple[int, ObjectStat] | None],
    done: queue.SimpleQueue[tuple[int, BaseException | None]],
    advance: Callable[[int], None],
) -> None:
    while (entry := todo.get()) is not None:
        number, item = entry
        try:
            _bring(client, item, advance)
            done.put((number, None))
        except BaseException as e:  # noqa: BLE001 - raised again in the thread that waits
            done.put((number, e))


def _bring(client: Client, item: ObjectStat, advance: Callable[[int], None]) -> None:
    with client.open(item.url, version=item.version, size=item.size) as shard:
        for start in range(0, shard.size, _STEP):
            end = min(start + _STEP, shard.size)
            if shard.cached:
                shard.wait(start, end)
                advance(end - start)
        if not shard.cached:
            raise CacheFull(f"could not be cached: {shard.uncached_reason}", url=item.url, hint="see cachefs status")
