"""The facade: :class:`ShardDataset`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from .decode import DecodeOption
from .definition import Definition
from .formats import Format, resolve
from .formats.packing import Packing
from .formats.where import Predicate, Where, as_where
from .lanes import Balance
from .manifest import Manifest
from .manifest_file import save_manifest
from .nodetables import Nodes
from .options import Options, as_fields, as_names, as_nodes
from .planned import PlannedDataset
from .samples import Transform
from .sources import Source

if TYPE_CHECKING:
    from cachefs.client import Client


class ShardDataset(PlannedDataset):
    """A data set of shards in an object store or on disk, read in an order that is exact, elastic and resumable.

    The data set is dealt into one global sequence per epoch, the same for every number of ranks and workers; a rank
    reads its part of each global batch. Nothing is listed or read before the first use.

    ``source``: a folder or prefix, a pattern (``s3://b/x-{000..011}.tar``, ``*.mds``), a list of URLs, another tool's
    index, or a file that :meth:`save_manifest` wrote. ``batch_size``: samples per rank, as in DataLoader, which must be
    given the same (or ``batched()`` and ``batch_size=None``); ``global_batch_size``: samples over all ranks, the form
    that keeps every batch the same when the number of ranks changes. ``format``: a name or an object of
    :mod:`loader.formats`; without it the bytes decide. ``fields``: only these; a sample without one of them is an
    error. ``transform(sample, rng)``: ``rng`` is a numpy generator keyed by (seed, epoch, sample id), so augmentation
    resumes exactly. ``drop_last`` leaves out the incomplete last batch (with ``drop_last=False`` ranks that could not
    all have a part of it are refused); ``pad=True`` fills it with repeats from the epoch's start, marked in the field
    ``__repeat__``.
    ``decode``: see :mod:`loader.decode`. ``ids`` adds ``__id__`` (shard number << 32 | number in the shard).
    ``rank`` and ``world_size`` are data-parallel; by default those of ``torch.distributed`` if it is initialised, else
    of the environment; or a ``mesh`` whose (``dp``) dimension splits the data. ``lanes``, ``block_shards``,
    ``exchange``: how wide the order mixes (``loader.lanes``, ``loader.order``). ``balance``: what lanes have equally
    much of, ``"bytes"`` or (where counts are known from the beginning) ``"samples"``. ``nodes``: on which node each
    rank is, so that a node reads its own lanes: the name of each rank's node, or how many nodes there are, each with as
    many ranks in a row; by default as torchrun or Slurm tells (``loader.nodes``). ``on_error="skip"``: a damaged sample
    is replaced by the last good one of its batch and counted in :attr:`skipped`; a tar that cannot be indexed counts
    as empty. ``where``: an Arrow expression, or :class:`loader.Where` of a function: the samples that are kept
    (:mod:`loader.formats.where`). ``packing``: :class:`loader.Packing`, documents as samples of one length.
    ``client``: a :class:`cachefs.Client`; by default one with the settings of the environment.

    Values are views into private, writable maps of the shards: they stay valid as long as they are referenced, and
    what is written into them is seen by nobody else and in no later epoch.

    Epochs advance by themselves: every pass is the next epoch, in every worker mode, also after one that was broken
    off. A pass begins where something is read from an iterator for the first time; with DataLoader workers, which read
    at once, where the iterator is made, also if nobody ever reads from it. Where another epoch is wanted, call
    :meth:`set_epoch` before ``iter``.
    """

    _definition: Definition

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        format: str | Format | None = None,
        fields: Sequence[str] | None = None,
        transform: Transform | None = None,
        drop_last: bool = True,
        pad: bool = False,
        decode: DecodeOption = None,
        ids: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        lanes: int | None = None,
        block_shards: int | None = None,
        exchange: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        client: Client | None = None,
        global_batch_size: int | None = None,
        where: Where | Predicate | None = None,
        packing: Packing | None = None,
        nodes: Nodes = None,
        balance: Balance = "bytes",
    ) -> None:
        options = Options(
            source=as_names(source),
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            format=resolve(format),
            fields=as_fields(fields),
            transform=transform,
            drop_last=drop_last,
            pad=pad,
            decode=decode,
            ids=ids,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            lanes=lanes,
            block_shards=block_shards,
            exchange=exchange,
            on_error=on_error,
            nodes=as_nodes(nodes),
            balance=balance,
            views=tuple(view for view in (as_where(where), packing) if view is not None),
        )
        super().__init__(Definition(options, client))

    @property
    def manifest(self) -> Manifest:
        """The shards with sizes, versions and the counts that are known."""
        return self._definition.manifest

    def save_manifest(self, path: str | os.PathLike[str]) -> None:
        """Keep the manifest as a local file (``*.manifest``), which may be given as ``source``: then nothing is listed
        or counted again. It stands for the shards as they are now (:mod:`loader.manifest_file`). Counts what is not."""
        self.count()
        save_manifest(self.manifest, path)

    def __repr__(self) -> str:
        return f"<ShardDataset of {self._definition.options.source!r}>"
