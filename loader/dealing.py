"""Whether the DataLoader that reads a data set puts as many samples into a batch as the data set deals.

The two numbers must be equal: workers take whole batches in turn, so with another size the order would depend on their
number and a state would not say what was used. ``loader.collate`` notices; any other ``collate_fn`` cannot. A
DataLoader does not tell a data set its batch size, but it asks for samples from a call that knows it.
"""

from __future__ import annotations

from cachefs.errors import ConfigError

from .calls import callers
from .passes import BatchRule

_FETCH = ("torch.utils.data._utils.fetch", "fetch")


def check_dealt(rule: BatchRule) -> None:
    """Raises ``ConfigError`` if a DataLoader is asking for the next sample and its batches are not the data set's."""
    size = _asked_for()
    if size is None:
        return
    share, rest = divmod(rule.global_batch, rule.place.world)
    if rest:
        raise ConfigError(
            f"{rule.global_batch} samples over {rule.place.world} ranks make batches of no one size, as a DataLoader's",
            hint="use DataLoader(dataset.batched(), batch_size=None)",
        )
    if size != share:
        raise ConfigError(
            f"the DataLoader makes batches of {size}, the data set deals batches of {share}",
            hint="give both the same batch_size, or use DataLoader(dataset.batched(), batch_size=None)",
        )


def check_whole() -> None:
    """Raises ``ConfigError`` if a DataLoader is about to make batches of whole batches."""
    size = _asked_for()
    if size is not None:
        raise ConfigError(
            f"batched() gives whole batches, and the DataLoader would put {size} of them into one",
            hint="use DataLoader(dataset.batched(), batch_size=None)",
        )


def _asked_for() -> int | None:
    """The batch size of the DataLoader whose call this is; ``None`` if it is none's, or of one with none."""
    frame = next(callers(), None)
    if frame is None or (frame.f_globals.get("__name__"), frame.f_code.co_name) != _FETCH:
        return None
    fetcher, wanted = frame.f_locals.get("self"), frame.f_locals.get("possibly_batched_index")
    if not getattr(fetcher, "auto_collation", False) or not isinstance(wanted, list | tuple):
        return None
    return len(wanted)
