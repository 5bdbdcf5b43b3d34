"""The one exception tree of nearflash: what went wrong, with which URL, and what to do about it.

Every error that a user can meet derives from :class:`NearflashError`. Its text is one line: the thing (URL, offset,
tensor, rank), what is wrong, and, where there is one, the way out. Where Python has a name for the situation
(`FileNotFoundError`, `PermissionError`, `TimeoutError`, ...) the class derives from that as well, so code that knows
nothing of nearflash handles it.

All classes can be built from one string alone and survive pickling: DataLoader workers re-raise them in the parent,
with the worker's traceback as the text, which keeps its lines.
"""

from __future__ import annotations

from typing import Any

from .redaction import redact

_TRACEBACK = "Traceback (most recent call last):\n"


class NearflashError(Exception):
    """Base of all errors raised on purpose by cachefs, loader and ckptstore.

    ``what`` says what is wrong; ``url`` names the object or path; ``offset`` is a byte offset within it; ``hint`` is
    the way out. ``str(e)`` joins them into one line, without the signatures and passwords that URLs may hold.
    """

    def __init__(
        self, what: str = "", *, url: str | None = None, offset: int | None = None, hint: str | None = None
    ) -> None:
        self.what = what
        self.url = url
        self.offset = offset
        self.hint = hint
        super().__init__(self._line())

    def _line(self) -> str:
        if _TRACEBACK in self.what and self.url is None and self.offset is None and self.hint is None:
            return redact(self.what)  # torch raises a worker's error anew with its traceback as the only text
        where = redact(self.url or "")
        if self.offset is not None:
            where += f" at byte {self.offset}"
        what = redact(self.what)
        line = f"{where}: {what}" if where else what
        if self.hint:
            line += f" ({redact(self.hint)})"
        return " ".join(line.split())

    def __str__(self) -> str:
        return self._line()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, self.url, self.offset, self.hint))


def _rebuild(
    cls: type[NearflashError], what: str, url: str | None, offset: int | None, hint: str | None
) -> NearflashError:
    return cls(what, url=url, offset=offset, hint=hint)


class ConfigError(NearflashError, ValueError):
    """A setting, argument or URL that cannot be used as it is."""


# --- origin ---------------------------------------------------------------------------------------------------------


class StoreError(NearflashError):
    """An object store refused, failed or answered wrongly."""


class NotFound(StoreError, FileNotFoundError):
    """No such key, bucket or path (or, without the right to list, perhaps one that may not be seen)."""


class Denied(StoreError, PermissionError):
    """The credentials are missing, wrong, expired, or lack a right."""


class Throttled(StoreError):
    """The store asked for fewer requests (503 SlowDown, 429). Retryable."""


class Changed(StoreError):
    """The object is no longer the version that was opened."""


class PreconditionFailed(StoreError):
    """A conditional write found something else than its condition allows (409, 412)."""


class Unavailable(StoreError, ConnectionError):
    """No answer, a cut connection, a 5xx: may work later. Retryable."""


class Stalled(Unavailable):
    """No byte arrived for the stall timeout. Retryable."""


class Corrupt(StoreError):
    """Bytes whose length, range or digest is not what it must be."""


class ClockSkewed(StoreError):
    """The store refuses requests because this machine's clock and its own are too far apart."""


# --- cache ----------------------------------------------------------------------------------------------------------


class CacheError(NearflashError):
    """The node's cache could not do what was asked."""


class DaemonUnavailable(CacheError, ConnectionError):
    """No daemon answers on the socket and none could be started by the deadline."""


class ProtocolMismatch(CacheError):
    """Client and daemon share no protocol version."""


class CacheFull(CacheError):
    """The quota or the disk leaves no room for an entry; reads pass through to the origin."""


class CacheBusy(CacheError):
    """Another process owns the cache directory."""


class DiskFault(CacheError, OSError):
    """The cache directory's disk failed (EIO, EROFS, vanished mount); reads pass through to the origin."""


class Superseded(CacheError):
    """The file under a map was replaced before all of it had arrived: map the object anew."""


class DeadlineExceeded(NearflashError, TimeoutError):
    """A wait reached its deadline."""


# --- loader ---------------------------------------------------------------------------------------------------------


class DataError(NearflashError):
    """Something is wrong with the training data or with how it is asked for."""


class FormatError(DataError, ValueError):
    """A shard is not what its format says: names the URL and the byte offset."""


class UnknownFormat(DataError, ValueError):
    """No known format fits the bytes; a headerless one must be named with ``format=``."""


class MissingField(DataError, KeyError):
    """A sample lacks a field that was asked for; the text lists those present."""


class StateError(DataError, ValueError):
    """A loader state that belongs to other data or to a newer format version."""


class EmptyDataset(DataError, ValueError):
    """No sample, or not enough for one batch."""


class CountsUnknown(DataError, TypeError):
    """Needs the sample counts of shards that have not been indexed yet; ``len()`` treats it as "no length"."""


# --- checkpoints ----------------------------------------------------------------------------------------------------


class CheckpointError(NearflashError):
    """A checkpoint could not be saved, found, verified or loaded."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No such step or store; the text lists what is there."""


class CheckpointDamaged(CheckpointError):
    """A file of a committed checkpoint is missing, short, or has the wrong digest: names tensor and file."""


class CheckpointUnsupported(CheckpointError):
    """A record of a newer format version: not damaged, but not readable by this version."""


class CheckpointConflict(CheckpointError):
    """Another attempt owns the store, or has committed this step already."""


class CheckpointMismatch(CheckpointError, ValueError):
    """What is asked for does not fit what was saved: names tensor, dtype, shape or key."""


class RankFailed(CheckpointError):
    """A rank failed or was not heard of by the deadline; the save failed on all ranks."""
