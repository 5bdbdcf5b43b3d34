"""A pool of open shards that several threads read from."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from cachefs.errors import DataError

from .buffers import ShardPool
from .formats import SampleIndex
from .opening import OpenShard


class SharedPool(ShardPool):
    """A :class:`ShardPool` for any number of threads of one process. A shard that two of them want is opened once,
    while the others go on with theirs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock = threading.Lock()
        self._opening: dict[int, Future[OpenShard]] = {}
        self._closed = False

    def get(self, number: int) -> OpenShard:
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
                return shard
            if number in self._failed:
                raise self._failed[number].with_traceback(None)
            other = self._opening.get(number)
            if other is None:
                own = self._opening[number] = Future()
                index = self._indexes.get(number)
        if other is not None:
            return other.result()
        try:
            shard = self._load(number, index)
        except BaseException as e:
            with self._lock:
                if isinstance(e, DataError):
                    self._failed[number] = e
                del self._opening[number]
            own.set_exception(e)
            raise
        with self._lock:
            if self._closed:
                shard.close()  # what was read from it stays valid; nobody would close it later
            else:
                self._admit(number, shard)
            del self._opening[number]
        own.set_result(shard)
        return shard

    def _load(self, number: int, index: SampleIndex | None) -> OpenShard:
        shard = super()._load(number, index)
        if shard.format.keeps_state(shard.source):
            shard.guard = threading.Lock()
        return shard

    def _let_go(self, shard: OpenShard) -> None:
        # Another thread may be reading from it, and may still wait for bytes: then it is closed when that is done with
        # it, since its leases go with the last reference.
        if shard.guard is None:
            shard.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            super().close()
