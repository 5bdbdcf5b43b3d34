"""One shard by itself: :func:`open_shard`."""

from __future__ import annotations

import operator
import os
import warnings
from typing import TYPE_CHECKING

from cachefs.errors import ConfigError, Denied, NotFound

from .formats import Format, resolve
from .opening import OpenShard, open_mapped
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from cachefs.client import Client


class DataWarning(UserWarning):
    """Something is odd about the training data, though every sample could be read."""


class ShardReader:
    """The samples of one shard, by number: ``len(reader)``, ``reader[i]`` (negative counts from the end).

    Values are as stored: ``uint8`` views for tar members, native values and array views for MDS columns, token views.
    They stay valid after :meth:`close`. Writing into them touches private memory of this reader only.
    """

    def __init__(self, shard: OpenShard) -> None:
        self._shard = shard
        self.url = shard.url
        self.format = shard.format

    @property
    def skipped(self) -> int:
        """Entries of the shard that belong to no sample (tar members without a key)."""
        return self._shard.index.skipped

    def __len__(self) -> int:
        return len(self._shard.index)

    def __getitem__(self, i: int) -> Sample:
        """Sample ``i``. Raises ``IndexError``, or ``FormatError`` for one that is damaged."""
        place = operator.index(i)
        n = len(self)
        if not -n <= place < n:
            raise IndexError(f"{self.url}: sample {i} of {n}")
        shard = self._shard
        return shard.read(place % n)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def close(self) -> None:
        """Give back leases and descriptors. Idempotent.

        Samples already read stay valid. Others can be read as long as all their bytes have arrived, which need not be
        so for formats that are decoded piece by piece (Parquet).
        """
        self._shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ShardReader of {self.url}: {len(self)} {self.format.name} samples>"


def open_shard(
    path_or_url: str | os.PathLike[str], format: str | Format | None = None, *, client: Client | None = None
) -> ShardReader:
    """Open one shard, local or remote, and find its samples. A folder that holds one shard stands for it.

    ``format`` as in :class:`loader.ShardDataset`; without it the bytes decide. Raises ``UnknownFormat`` or
    ``FormatError``, or what opening raises (``NotFound``, ``Denied`` ...).
    """
    if client is None:
        from cachefs.client import connect

        client = connect()
    shard = _open(os.fspath(path_or_url), resolve(format), client)
    for note in shard.index.notes:
        warnings.warn(f"{shard.url}: {note}", DataWarning, stacklevel=2)
    return ShardReader(shard)


def _open(url: str, format: Format | None, client: Client) -> OpenShard:
    if not os.path.isdir(os.path.expanduser(url)):
        try:
            return open_mapped(client, url, format)
        except NotFound as e:
            missing = e
    else:
        missing = NotFound("a folder that holds no shard", url=url)
    # a name that is no object may be a folder that holds one shard, such as an LMDB or zarr store
    from .sources import find_shards

    try:
        found = find_shards(url, client, format)
    except (NotFound, Denied):
        raise missing from None
    if len(found.stats) != 1:
        raise ConfigError(
            f"a folder of {len(found.stats)} shards", url=url, hint="name one of them, or use loader.ShardDataset"
        )
    [stat] = found.stats
    return open_mapped(client, stat.url, found.named(format), version=stat.version, size=stat.size)
