"""Whether the DataLoader that reads a data set puts as many samples into a batch as the data set deals.

The two numbers must be equal: workers take whole batches in turn, so with another size the order would depend on their
number and a state would not say what was used. ``loader.collate`` notices; any other ``collate_fn`` cannot. A
DataLoader does not tell a data set its batch size, but it asks for samples from a call that knows it. This is looked at
only where it asks the data set itself: whatever stands between the two may regroup samples as it likes.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from cachefs.errors import ConfigError

from .calls import callers
from .passes import BatchRule
from .workers import Worker

_FETCH = ("torch.utils.data._utils.fetch", "fetch")


def check_dealt(rule: BatchRule, worker: Worker | None) -> None:
    """Raises ``ConfigError`` if a DataLoader is asking the calling generator for samples that it would deal wrongly:
    in batches that are not the data set's, or one by one from several workers in turn, which have whole batches."""
    found = _asked_by(sys._getframe(1))
    if found is None:
        return
    share, size = rule.share, _batch_size(found)
    if size is None:
        if worker is not None and worker.count > 1 and share > 1:
            raise ConfigError(
                f"DataLoader(batch_size=None) takes single samples from {worker.count} workers in turn, and each has "
                "whole batches: the order would depend on their number",
                hint="use DataLoader(dataset.batched(), batch_size=None), or at most one worker",
            )
    elif size != share:
        raise ConfigError(
            f"the DataLoader makes batches of {size}, the data set deals batches of {share}",
            hint="give both the same batch_size, or use DataLoader(dataset.batched(), batch_size=None)",
        )


def check_whole() -> None:
    """Raises ``ConfigError`` if a DataLoader is about to make batches of the calling generator's whole batches."""
    found = _asked_by(sys._getframe(1))
    size = None if found is None else _batch_size(found)
    if size is not None:
        raise ConfigError(
            f"batched() gives whole batches, and the DataLoader would put {size} of them into one",
            hint="use DataLoader(dataset.batched(), batch_size=None)",
        )


def _asked_by(generator: FrameType) -> FrameType | None:
    """The call in which a DataLoader asks that generator itself for what comes next; ``None`` if none does."""
    frame = next(callers(), None)
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) != _FETCH:
        return None
    asked: Any = getattr(frame.f_locals.get("self"), "dataset_iter", None)
    return frame if getattr(asked, "gi_frame", None) is generator else None


def _batch_size(fetch: FrameType) -> int | None:
    """The batch size of the DataLoader whose call this is; ``None`` if it has none."""
    fetcher, wanted = fetch.f_locals.get("self"), fetch.f_locals.get("possibly_batched_index")
    if not getattr(fetcher, "auto_collation", False) or not isinstance(wanted, list | tuple):
        return None
    return len(wanted)
