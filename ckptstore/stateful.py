"""Objects that know their own state: modules, optimizers, and anything with ``state_dict`` and ``load_state_dict``.

Their state is saved as the dict that ``state_dict()`` gives, so it can be loaded without the object. A module's names
are freed of what wrappers add (DistributedDataParallel's ``module.``, ``torch.compile``'s ``_orig_mod.``, activation
checkpointing's and FSDP's), so a state saved under one wrapper loads under another or none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import nn

_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Stateful(Protocol):
    """An object whose state is saved and loaded. ``per_rank = True`` on it: every rank keeps its own state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether a value can give and take its state. (``isinstance`` of a protocol takes a hundred times as long.)"""
    kind = type(value)
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


class Entry(NamedTuple):
    """One value of a module's state: the name without wrappers, the module's own key, and whether it is a buffer."""

    name: str
    key: str
    value: Any
    buffer: bool


def module_entries(module: nn.Module) -> list[Entry]:
    """The module's state, in its own order. Tensors share memory with the module."""
    strip = sorted(_wrapper_prefixes(module), key=len, reverse=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return [Entry(_stripped(key, strip), key, value, key not in parameters) for key, value in state.items()]


def is_replicated(module: nn.Module) -> bool:
    """Whether a wrapper keeps copies of this module on several ranks, whose buffers then may drift apart.

    That is so under DistributedDataParallel (it broadcasts replica 0's buffers before each forward pass) and FSDP.
    """
    return any(
        isinstance(m, nn.parallel.DistributedDataParallel) or type(m).__name__ in {"FullyShardedDataParallel"}
        for m in module.modules()
    ) or any(hasattr(p, "device_mesh") for p in module.parameters())


def owns_storage(module: nn.Module, entries: list[Entry]) -> bool:
    """Whether the state's tensors are the module's own memory, so that filling them fills the module."""
    own = {_address(t) for t in (*module.parameters(), *module.buffers())}
    return all(_address(e.value) in own for e in entries if isinstance(e.value, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage().data_ptr())


def _wrapper_prefixes(module: nn.Module) -> Iterator[str]:
    """Key prefixes that end in a part which a wrapper put there."""
    for path, inner in module.named_modules(remove_duplicate=False):
        own = f"{path}." if path else ""
        if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            yield f"{own}module."
        if path.rpartition(".")[2] in _WRAPPER_PARTS:
            yield own


def _stripped(key: str, prefixes: list[str]) -> str:
    for prefix in prefixes:
        if key.startswith(prefix):
            parent = prefix[:-1].rpartition(".")[0]
            key = f"{parent}.{key[len(prefix) :]}" if parent else key[len(prefix) :]
    return key


class RngState:
    """The random generators of this process as a state: Python's, numpy's global one, torch's on CPU and on each GPU.

    Put ``RngState()`` into the dict that is saved and loaded; each rank keeps its own. On another number of ranks
    rank r takes over what rank ``r mod N`` of the N saved ones had.
    """

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": {"version": version, "words": np.array(words, dtype=np.uint64), "gauss": gauss},
            "numpy": {
                "kind": str(kind),
                "keys": np.array(keys),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached_gaussian": float(cached),
            },
            "torch": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all generators. GPUs that were not saved, or are not there, are left alone."""
        python, numpy = state_dict["python"], state_dict["numpy"]
        random.setstate((python["version"], tuple(int(w) for w in python["words"]), python["gauss"]))
        legacy = (numpy["kind"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"])
        np.random.set_state(legacy)
        torch.random.set_rng_state(state_dict["torch"])
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, state in zip(range(devices), state_dict["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
