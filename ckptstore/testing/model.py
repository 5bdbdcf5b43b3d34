"""A model of an object store, and of the attempts that use it at the same time.

:class:`ModelStore` keeps objects in memory. An attempt talks to it through a :class:`Handle`, which asks a hook before
each request: the hook may let the attempt wait for its turn (:mod:`.interleave`) and may order a :class:`Fault`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import md5
from typing import TYPE_CHECKING

from cachefs.errors import Corrupt, NotFound, PreconditionFailed, Unavailable
from cachefs.objstore.abc import Listing, ObjectMeta
from cachefs.objstore.url import parse_url

from ..storage_object import ObjectStorage
from .saving import InstantClock

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE = 3
"""Objects in one page of a listing: small, so that paging is met."""


class Fault(Enum):
    """What may happen to a request. A late one is carried out by :meth:`ModelStore.deliver`, or never."""

    NONE = "none"
    REFUSED = "refused"
    """Not carried out; the attempt gets ``Unavailable``."""
    REPLY_LOST = "reply lost"
    """Carried out; the attempt gets ``Unavailable``."""
    LATE = "late"
    """Carried out later; the attempt gets ``Unavailable`` now."""
    TWICE = "twice"
    """Carried out now, and once more later."""
    KILLED = "killed"
    """Not carried out; the attempt dies."""
    KILLED_AFTER = "killed after"
    """Carried out; the attempt dies."""
    KILLED_LATE = "killed, late"
    """Carried out later; the attempt dies now."""


class Killed(BaseException):
    """A SIGKILL: no handler of the code under test may see it and go on."""


@dataclass(frozen=True)
class Request:
    """One request of one attempt: ``op`` is the store's method."""

    actor: str
    op: str
    key: str

    @property
    def writes(self) -> bool:
        return self.op in {"put", "put_multipart", "delete"}


Hook = Callable[[Request], Fault]


class ModelStore:
    """Objects in memory, strongly consistent and atomic per request, as object stores are today."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.late: list[tuple[Request, Callable[[], object]]] = []
        self.log: list[Request] = []
        self._lock = threading.Lock()

    def handle(self, actor: str = "reader", hook: Hook | None = None) -> Handle:
        """A client's connection."""
        return Handle(self, actor, hook)

    def storage(
        self, actor: str = "reader", hook: Hook | None = None, url: str = "memory://model/run"
    ) -> ObjectStorage:
        """A checkpoint storage over a connection, whose pauses take no time."""
        return ObjectStorage(parse_url(url), self.handle(actor, hook), clock=InstantClock())

    def deliver(self, index: int = 0) -> None:
        """Carry out one late request; nobody gets its answer."""
        _, act = self.late.pop(index)
        try:
            with self._lock:
                act()
        except PreconditionFailed:
            pass  # the answer that nobody gets

    def carry_out(self, request: Request, act: Callable[[], object]) -> object:
        with self._lock:
            self.log.append(request)
            return act()


class Handle:
    """One client of a :class:`ModelStore`, with the methods of ``BlockingStore``. Dead once it was killed."""

    def __init__(self, model: ModelStore, actor: str, hook: Hook | None) -> None:
        self._model = model
        self._actor = actor
        self._hook = hook
        self._dead = False
        self.closed = False

    def head(self, key: str) -> ObjectMeta:
        return self._request("head", key, lambda: _meta(key, self._find(key)))  # type: ignore[return-value]

    def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        data = self._request("get", key, lambda: self._find(key))
        assert isinstance(data, bytes)
        return _meta(key, data), data

    def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        data = self._request("get_range", key, lambda: self._find(key))
        assert isinstance(data, bytes)
        if end > len(data):
            raise Corrupt(f"has {len(data)} bytes, wanted up to {end}", url=self._url(key))
        return data[start:end]

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listing]:
        keys = self._request("list", prefix, lambda: sorted(k for k in self._model.objects if k.startswith(prefix)))
        assert isinstance(keys, list)
        folders = {prefix + k[len(prefix) :].partition("/")[0] + "/" for k in keys if "/" in k[len(prefix) :]}
        plain = [k for k in keys if not delimiter or "/" not in k[len(prefix) :]]
        metas = [_meta(k, self._model.objects[k]) for k in plain if k in self._model.objects]
        for start in range(0, max(len(metas), 1), PAGE):
            first = delimiter and start == 0
            yield Listing(tuple(metas[start : start + PAGE]), tuple(sorted(folders)) if first else ())

    def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        assert isinstance(parts, Sequence)
        whole = b"".join(parts)

        def act() -> ObjectMeta:
            there = self._model.objects.get(key)
            if (if_none_match and there is not None) or (
                if_match is not None and (there is None or _meta(key, there).etag != if_match)
            ):
                raise PreconditionFailed("the condition does not hold", url=self._url(key))
            self._model.objects[key] = whole
            return _meta(key, whole)

        return self._request("put", key, act)  # type: ignore[return-value]

    def put_multipart(self, key: str, parts: Iterable[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        whole = b"".join(parts)

        def act() -> ObjectMeta:
            self._model.objects[key] = whole
            return _meta(key, whole)

        return self._request("put_multipart", key, act)  # type: ignore[return-value]

    def delete(self, keys: Sequence[str]) -> None:
        gone = list(keys)
        self._request("delete", gone[0] if gone else "", lambda: [self._model.objects.pop(k, None) for k in gone])

    def close(self) -> None:
        self.closed = True

    def _find(self, key: str) -> bytes:
        try:
            return self._model.objects[key]
        except KeyError:
            raise NotFound("no such key", url=self._url(key)) from None

    def _url(self, key: str) -> str:
        return f"memory://model/{key}"

    def _request(self, op: str, key: str, act: Callable[[], object]) -> object:
        if self._dead:
            raise Killed
        request = Request(self._actor, op, key)
        fault = self._hook(request) if self._hook is not None else Fault.NONE
        if fault in {Fault.LATE, Fault.KILLED_LATE, Fault.TWICE}:
            self._model.late.append((request, act))
        if fault in {Fault.KILLED, Fault.KILLED_LATE}:
            self._dead = True
            raise Killed
        if fault in {Fault.LATE, Fault.REFUSED}:
            raise Unavailable("no answer", url=self._url(key))
        result = self._model.carry_out(request, act)
        if fault is Fault.KILLED_AFTER:
            self._dead = True
            raise Killed
        if fault is Fault.REPLY_LOST:
            raise Unavailable("the answer was lost", url=self._url(key))
        return result


def _meta(key: str, data: bytes) -> ObjectMeta:
    return ObjectMeta(key, len(data), etag=f'"{md5(data, usedforsecurity=False).hexdigest()}"', modified=1.0)
