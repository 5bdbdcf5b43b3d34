"""What a client hands out: :class:`Shard`, one open object, and :class:`ObjectStat`, what is known of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .attachments import check_name
from .errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One object as the origin describes it, and how much of it this node holds.

    ``size`` and ``cached_bytes`` in bytes. ``version`` tells this content from another under the same URL; pass it
    (with the size) to ``Client.open`` to save the request that asks for it. In listings with a delimiter a common
    prefix appears with a URL that ends in ``/``, size 0 and an empty version.
    """

    url: str
    size: int
    version: str
    cached_bytes: int = 0

    @property
    def is_prefix(self) -> bool:
        """A folder of a listing with a delimiter, not an object."""
        return not self.version and self.url.endswith("/")


class FillingView:
    """A map of an object of which not all bytes need to be there yet; see :meth:`Shard.filling`.

    ``view`` is as :meth:`Shard.view` gives it, but bytes that have not arrived read as anything, mostly zeros.
    ``arrive(start, end)`` waits for bytes and tells up to where all are there; without it, all are. Thread-safe.
    """

    def __init__(self, view: memoryview, url: str, arrive: Callable[[int, int], int] | None = None) -> None:
        self.view = view
        self._url = url
        self._arrive = arrive
        self._there = len(view) if arrive is None else 0

    def ready(self, start: int, end: int) -> None:
        """Return once bytes ``[start, end)`` can be read in :attr:`view`.

        Bytes within what is known to be there cost two comparisons, others that are there a look at shared memory.
        Raises :class:`~.errors.Superseded` when the cache goes on with another file than the one that is mapped (the
        entry was evicted while its daemon was away, or the object is read past the cache by now): what was ready stays
        so, for the rest call :meth:`Shard.filling` again. Otherwise raises as :meth:`Shard.wait`. The shard has to be
        open while bytes are still missing.
        """
        if 0 <= start <= end <= self._there:
            return
        if not 0 <= start <= end <= len(self.view):
            raise ConfigError(f"bytes {start} to {end} are not within its {len(self.view)}", url=self._url)
        if self._arrive is not None:
            self._there = self._arrive(start, end)


class Shard(ABC):
    """One open object at one version.

    Usable from several threads and, after a fork, from parent and child independently. Closing gives back the lease
    on the cache entry; memory already handed out stays valid until its last user is gone.
    """

    url: str
    size: int
    """Bytes."""
    version: str

    @property
    @abstractmethod
    def cached(self) -> bool:
        """False: the cache could not take the object; bytes pass through to private memory of this process."""

    @property
    def uncached_reason(self) -> str:
        """Why :attr:`cached` is false; empty otherwise."""
        return ""

    @abstractmethod
    def view(self) -> memoryview:
        """All bytes, as a fresh *writable* private mapping: 1-D, unsigned bytes, ``len() == size``.

        Waits until every byte is present. Writing touches private pages only: neither the cached file nor any other
        view sees it. The mapping lives as long as the memoryview or anything made from it (numpy arrays, tensors,
        slices) and goes with the last of them; it does not need the shard to stay open. Raises
        ``DeadlineExceeded`` when the origin makes no progress, or the origin's error.
        """

    def filling(self) -> FillingView:
        """A view as :meth:`view` gives it, at once: ask it for the bytes that are needed before looking at them.

        Until bytes are ready they must not be written to, locked or pinned (``mlock``, ``cudaHostRegister``): the page
        would be this process's own from then on, and not show them. Where the system does not promise that a private
        map follows its file, and for objects that are there anyway, all bytes are waited for here.
        """
        return FillingView(self.view(), self.url)

    @abstractmethod
    def wait(self, start: int, end: int) -> None:
        """Return once bytes ``[start, end)`` can be read through :meth:`fileno` or a view.

        Costs no round trip where they are present already. Raises as :meth:`view`.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A read-only file descriptor of the object's bytes, owned by the shard and valid until it is closed.

        Call it after :meth:`wait`: a wait that outlives a restart of the daemon may go on with another file.
        """

    def attachment(self, name: str) -> bytes | None:
        """What was attached to this object in the cache under this name, by this or another process; or ``None``.

        Names are 1 to 64 characters of ``a-z 0-9 . -``: put into them all that the bytes depend on besides the object.
        What cannot be read, or is damaged, is not there. Local files and objects past the cache have no attachments.
        """
        check_name(name, self.url)
        self.fileno()  # raises where the shard is closed
        return None

    def attach(self, name: str, data: Buffer) -> None:
        """Keep bytes made from this object beside it in the cache, for as long as the cache holds this version of it.

        Best effort: without room, on a faulty disk, or without a daemon nothing is kept, and nothing raised. At most
        64 MiB are kept, and eight attachments of one object; the first of a name stays. All bytes of the object need
        not have arrived yet.
        """
        check_name(name, self.url)
        self.fileno()

    @abstractmethod
    def close(self) -> None:
        """Give back lease and descriptors. Idempotent; not while another thread is inside a call of this shard."""

    def check_range(self, start: int, end: int) -> None:
        """Raise :class:`ConfigError` unless ``0 <= start <= end <= size``."""
        if not 0 <= start <= end <= self.size:
            raise ConfigError(f"bytes {start} to {end} are not within its {self.size}", url=self.url)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} ({self.size} bytes, version {self.version})>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
