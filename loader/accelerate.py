"""A data set under Hugging Face's accelerate: ``loader.accelerate.prepare(accelerator, dataloader)``.

``accelerator.prepare`` would divide the samples among the processes a second time (see ``loader.resharding``). What is
made here is one of accelerate's own loaders that leaves the batches as they are: it moves them to the process's device,
and tells the accelerator where an epoch ends, so ``accumulate``, ``gather_for_metrics``, ``save_state`` and
``load_state`` work as ever. Needs accelerate 1.0 or newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from cachefs.errors import ConfigError

from .batched import Batches
from .planned import PlannedDataset
from .sample import Batch, Stamp
from .threaded import Loader

if TYPE_CHECKING:
    from accelerate import Accelerator


def prepare(accelerator: Accelerator, source: DataLoader[Any] | PlannedDataset | Batches | Loader) -> PreparedLoader:
    """What to iterate under ``accelerator`` for a loader of a data set; for a data set, a :class:`loader.Loader` of it.

    Raises ``ConfigError`` if the data set is read for other ranks than the accelerator has, or the DataLoader's
    batches are not the data set's.
    """
    if isinstance(source, PreparedLoader):
        return source
    dataset = _dataset_of(source)
    _check_ranks(accelerator, dataset)
    device = accelerator.device if accelerator.device_placement else None
    if isinstance(source, PlannedDataset | Batches):
        collate_fn = source.collate_fn if isinstance(source, Batches) else None
        cuda = device if device is not None and device.type == "cuda" else None
        source = Loader(dataset, device=cuda, collate_fn=collate_fn)
    if isinstance(source, Loader):
        if source.filters:
            raise ConfigError(
                "a Loader with filter stages counts its batches and keeps its states in its own way",
                hint="iterate it as it is (it reads this rank's share), or filter with ShardDataset(where=...)",
            )
        source = _Threaded(source)
    _check_batches(source, dataset)
    prepared = PreparedLoader(source, dataset, accelerator, device)
    accelerator.prepare_data_loader(prepared)  # which takes note of one that is prepared, and leaves it as it is
    return prepared


class PreparedLoader(DataLoaderShard):  # type: ignore[misc]
    """The batches of a loader, for the process that iterates it; made by :func:`prepare`.

    Epochs advance by themselves, and :meth:`set_epoch` chooses one, as with the data set. :meth:`state_dict` says where
    the *user* is, whatever was read ahead, and loads at any number of processes and workers.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, source: DataLoader[Any], dataset: PlannedDataset, accelerator: Accelerator, device: torch.device | None
    ) -> None:
        rng_types = [kind for kind in accelerator.rng_types or () if kind != "generator"]
        super().__init__(
            dataset, device=device, rng_types=rng_types, _non_blocking=accelerator.non_blocking, batch_size=None
        )
        self.base_dataloader = source
        self.use_stateful_dataloader = True  # let save_state and load_state ask for the state
        self._data = dataset
        self._stamp: Stamp | None = None

    def __iter__(self) -> Iterator[Any]:
        """This process's batches of the next pass."""
        self.iteration = self._data.epoch  # what accelerate says to set_epoch: the epoch that comes next anyway
        for batch in super().__iter__():
            of = batch[0] if isinstance(batch, list | tuple) and batch else batch
            self._stamp = getattr(of, "stamp", None)
            if self._stamp is not None:
                self.remainder = self._own_samples(self._stamp)
            yield batch

    def _own_samples(self, stamp: Stamp) -> int:
        """How many samples of all ranks' last batch are no repeats, for ``gather_for_metrics``; 0: all are."""
        if not (stamp.repeats and self.end_of_dataloader):
            return 0
        rule = self._data.rule
        size = stamp.size if rule.place.world == 1 else rule.global_batch  # one rank's may be shorter
        return size - stamp.repeats

    def __len__(self) -> int:
        """Batches in a whole epoch: the same for every process."""
        return self._data.steps

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`ShardDataset.set_epoch`."""
        # an epoch that comes next only because a pass was broken off is not where that pass's last batch leads
        goes_on = self.iteration == epoch == self._data.epoch
        self.iteration = epoch
        if not goes_on:
            self._data.set_epoch(epoch)
            self._stamp = None

    def state_dict(self) -> dict[str, Any]:
        """The state after the batch that the loop has got last, or before the first."""
        if self._stamp is None:
            return self._data.state_dict()
        latest = Batch()
        latest.stamp = self._stamp
        return self._data.state_after(latest)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state says; a ``StatefulDataLoader``'s will do as well."""
        self._data.load_state_dict(self._data.state_from(state_dict))
        self._stamp = None

    def _update_state_dict(self) -> None:
        """Nothing is read ahead of the state."""

    @property
    def total_batch_size(self) -> int:
        """Samples in a batch of all processes."""
        return self._data.rule.global_batch

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set. Raises ``CountsUnknown`` where ``len`` does."""
        return self._data.total


class _Threaded(DataLoader[Any]):
    """A :class:`loader.Loader` in the shape of a DataLoader, which accelerate asks about and makes others of."""

    def __init__(self, source: Loader) -> None:
        super().__init__(source.dataset.batched(), batch_size=None)
        self._source = source

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._source)


def _dataset_of(source: Any) -> PlannedDataset:
    dataset = source
    if isinstance(source, DataLoader | Loader):
        dataset = source.dataset
    if isinstance(dataset, Batches):
        dataset = dataset.dataset
    if not isinstance(dataset, PlannedDataset):
        raise ConfigError(
            f"prepare() got a {type(source).__name__} that is no loader of a ShardDataset or Mixture",
            hint="pass the DataLoader that was not prepared yet, a loader.Loader, or the data set",
        )
    return dataset


def _check_ranks(accelerator: Accelerator, dataset: PlannedDataset) -> None:
    """Raises ``ConfigError`` unless the processes that must read different data are the data set's ranks."""
    same = 1  # processes that read the same data
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        same *= getattr(parallel, name, None) or 1
    place, wanted = dataset.rule.place, accelerator.num_processes // same
    if place.world != wanted:
        raise ConfigError(
            f"the data set is read for {place.world} rank(s), but the accelerator has {wanted} data-parallel processes",
            hint="make the data set after the Accelerator, without rank and world_size, or give it both (or a mesh)",
        )


def _check_batches(source: DataLoader[Any], dataset: PlannedDataset) -> None:
    rule = dataset.rule
    wanted = None if isinstance(source.dataset, Batches) else rule.share
    if source.batch_size != wanted:
        raise ConfigError(
            f"DataLoader(batch_size={source.batch_size}), but the data set deals "
            + ("whole batches" if wanted is None else f"this rank batches of {wanted}"),
            hint="give both the same batch_size, or use DataLoader(dataset.batched(), batch_size=None)",
        )
