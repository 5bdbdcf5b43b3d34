"""Accelerate's wrappers around an iterable data set, told from the calls that are under way.

``accelerator.prepare(DataLoader(dataset))``, which is also what the Trainer of Hugging Face's transformers does, takes
an ``IterableDataset`` for one that yields every sample in every process. A ``DataLoaderDispatcher`` reads it in process
0 alone and sends the others their parts; an ``IterableDatasetShard`` reads it in each process and keeps one part in
so many. Of a data set that yields a rank's own share, either loses the rest without a word. The wrappers tell the data
set nothing about themselves, but they call ``set_epoch`` and ``iter`` while their own ``__iter__`` is under way, in the
training process and in (forked) workers alike; there they are looked for. Nothing of accelerate is imported.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from cachefs.errors import ConfigError

from .calls import callers
from .workers import Place

_ACCELERATE: Final = "accelerate.data_loader"
_WRAPPERS: Final = (
    (_ACCELERATE, "DataLoaderDispatcher"),
    (_ACCELERATE, "IterableDatasetShard"),
    ("transformers.trainer_pt_utils", "IterableDatasetShard"),
)
_CALLS: Final = frozenset({"__iter__", "set_epoch"})


def refuse_resharding(place: Place) -> None:
    """Raises ``ConfigError`` if a wrapper that divides samples among processes asks for this rank's share of them."""
    if place.world == 1:  # the data set yields everything, so nothing is lost
        return
    wrappers = tuple(
        kind for module, name in _WRAPPERS if isinstance(kind := getattr(sys.modules.get(module), name, None), type)
    )
    if not wrappers:
        return
    for frame in callers():
        if frame.f_code.co_name in _CALLS:
            owner = frame.f_locals.get("self")
            if isinstance(owner, wrappers) and _processes(owner) > 1:
                raise ConfigError(
                    f"{type(owner).__name__} would divide rank {place.rank}'s share of the data among "
                    f"{_processes(owner)} processes again, and the rest would be lost",
                    hint="use loader.accelerate.prepare(accelerator, dataloader) in place of accelerator.prepare",
                )


def is_counted_by_accelerate() -> bool:
    """Whether ``set_epoch`` is being called by accelerate's own count of passes, which knows of no loaded state.

    Its loaders say at the start of each pass how many they have begun; a user's call of their ``set_epoch`` is another
    matter.
    """
    if _ACCELERATE not in sys.modules:
        return False
    for frame in callers():
        inside = frame.f_globals.get("__name__") == _ACCELERATE
        if not inside or frame.f_code.co_name != "set_epoch":
            return inside and frame.f_code.co_name == "__iter__"
    return False


def _processes(wrapper: Any) -> int:
    """Among how many processes it divides what it reads."""
    state = getattr(wrapper, "state", wrapper)
    return int(getattr(state, "num_processes", 1))
