"""The arguments of a data set, checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from cachefs.errors import ConfigError

from .decode import Decode, DecodeOption
from .formats import Format
from .formats.derived import View
from .lanes import Balance
from .nodetables import Nodes
from .samples import Transform
from .sources import Source
from .statefields import is_seed


@dataclass(frozen=True)
class Options:
    """The arguments of :class:`loader.ShardDataset`, checked."""

    source: Source
    batch_size: int | None
    global_batch_size: int | None
    shuffle: bool
    seed: int
    format: Format | None
    fields: tuple[str, ...] | None
    transform: Transform | None
    drop_last: bool
    pad: bool
    decode: DecodeOption
    ids: bool
    rank: int | None
    world_size: int | None
    mesh: Any
    lanes: int | None
    block_shards: int | None
    exchange: bool
    on_error: Literal["raise", "skip"]
    views: tuple[View, ...] = ()
    """What samples are made of those that are stored, one after the other (:mod:`loader.formats.derived`)."""
    nodes: Nodes = None
    balance: Balance = "bytes"

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise ConfigError("give batch_size (samples per rank) or global_batch_size, one of them")
        for name in ("batch_size", "global_batch_size", "lanes", "block_shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive number")
        if not is_seed(self.seed):
            raise ConfigError(f"seed={self.seed!r} is not an integer of 64 bits")
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error={self.on_error!r} is neither 'raise' nor 'skip'")
        if self.transform is not None and not _takes_two(self.transform):
            raise ConfigError("transform is called as transform(sample, rng)", hint="let it take two arguments")
        if self.balance not in ("bytes", "samples"):
            raise ConfigError(f"balance={self.balance!r} is neither 'bytes' nor 'samples'")
        _check_nodes(self.nodes)
        for view in self.views:
            if not isinstance(view, View):
                raise ConfigError(f"packing={view!r} says not how", hint="for example packing=loader.Packing(2048)")
        Decode(self.decode)


def as_names(source: Source) -> Source:
    """A source as text, or as a tuple of texts."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return tuple(os.fspath(part) for part in source)


def as_fields(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    """Field names as a tuple. Raises ConfigError for one name alone, which would be read as its letters."""
    if isinstance(fields, str):
        raise ConfigError(f"fields={fields!r} is one name", hint=f"write fields=[{fields!r}]")
    return None if fields is None else tuple(fields)


def as_nodes(nodes: Nodes) -> Nodes:
    """Names as a tuple. Raises ConfigError for what has no order, or is one name."""
    if nodes is None or isinstance(nodes, int):
        return nodes
    if isinstance(nodes, str | Set) or not all(isinstance(name, str) and name for name in nodes):
        raise ConfigError(f"nodes={nodes!r} is not a list of names", hint="name the node of each data-parallel rank")
    return tuple(nodes)


def _check_nodes(nodes: Nodes) -> None:
    count = 1 if nodes is None else nodes if isinstance(nodes, int) else len(nodes)
    if isinstance(nodes, bool) or count < 1:
        raise ConfigError(f"nodes={nodes!r} is neither a number of nodes nor the node of each rank")


def _takes_two(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # a builtin that does not tell
    return True
