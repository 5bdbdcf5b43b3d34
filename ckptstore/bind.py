"""A saved structure meets what it is to be loaded into: which memory is filled, what is made anew, what is wrong.

:class:`Binder` walks structure and template side by side and returns the result at once, with its tensors still
unfilled: :attr:`Binder.fills` says what goes where, :attr:`Binder.finishers` what is to be called after that. Nothing
of the caller's is touched before all that is wrong has been found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cachefs.errors import CheckpointMismatch

from .catalog import Catalog, Stored
from .dtypes import numpy_type
from .leaves import Sharded, View, fault_of, torch_dtype, view_of
from .optimizers import Place, optimizer_template
from .plan import shortened
from .stateful import is_stateful, module_entries, owns_storage
from .structure import (
    ARRAY,
    DICT,
    RANKS,
    TENSOR,
    TUPLE,
    Child,
    Selector,
    children,
    component,
    join,
    tag_of,
    tensor_names,
)
from .tree import decode, decode_key

ABSENT = object()
"""No template: the value is made anew."""


class Fill(NamedTuple):
    """Memory to fill: the box of ``view`` of the tensor ``stored``."""

    stored: Stored
    view: View


class Binder:
    """One load of one step on one rank. ``strict``: a template's keys must all be there, and a module's be all.

    Use :meth:`bind`, then :meth:`check`, then fill, then :meth:`finish`.
    """

    def __init__(
        self, catalog: Catalog, rank: int, selected: Selector, *, strict: bool = True, allow_pickle: bool = False
    ) -> None:
        self.fills: list[Fill] = []
        self.finishers: list[Callable[[], None]] = []
        self.taken_over: list[str] = []
        """Names whose value is another rank's own, because the number of ranks has changed."""
        self._catalog = catalog
        self._rank = rank
        self._selected = selected
        self._strict = strict
        self._allow_pickle = allow_pickle
        self._exact = False  # inside an object that is handed its whole state: what was saved, no more
        self._faults: list[str] = []
        self._made: dict[tuple[Any, ...], Any] = {}

    def bind(self, template: Any = ABSENT) -> Any:
        """The loaded state, to be filled. Without a template everything is made anew, on the CPU."""
        if template is not ABSENT and not isinstance(template, dict):
            raise CheckpointMismatch(f"what to load into is a dict, not {type(template).__name__}")
        return self._bind(self._catalog.structure, template, "")

    def check(self) -> None:
        """Raise :class:`CheckpointMismatch` with everything that does not fit."""
        if self._faults:
            raise CheckpointMismatch(
                shortened(self._faults),
                url=self._catalog.ref.folder,
                hint="only=... loads a part; strict=False leaves alone what is not in both",
            )

    def finish(self) -> None:
        """After filling: hand their state to optimizers and other objects."""
        for finisher in self.finishers:
            finisher()

    def _bind(self, node: Any, template: Any, path: str) -> Any:
        if tag_of(node) == RANKS:
            return self._bind_own(node, template, path)
        if isinstance(template, nn.Module):
            return self._bind_module(node, template, path)
        if isinstance(template, torch.optim.Optimizer):
            return self._bind_whole(node, template, path, optimizer_template(template))
        if is_stateful(template):
            return self._bind_whole(node, template, path, ABSENT)
        if template is ABSENT and isinstance(node, list) and self._selected.all and not _has_containers(node):
            return list(node)  # a long list of numbers needs no name for each
        inside = children(node, path)
        if inside is not None:
            if isinstance(node, dict) and tag_of(node) != TUPLE:
                return self._bind_dict(node, inside, template, path)
            return self._bind_sequence(node, inside, template, path)
        if not self._selected(path):
            return template
        if tag_of(node) in (TENSOR, ARRAY):
            return self._bind_leaf(node, template, path)
        if isinstance(template, (torch.Tensor, np.ndarray, Sharded)):
            self._faults.append(f"{path!r} was saved as a value, not as a tensor")
            return template
        return decode(node, path, allow_pickle=self._allow_pickle)

    def _bind_own(self, node: Any, template: Any, path: str) -> Any:
        source = self._catalog.source_rank(self._rank)
        for ranks, value in node[RANKS]:
            if source in ranks:
                if source != self._rank:
                    self.taken_over.append(path)
                return self._bind(value, template, path)
        if not self._selected(path):
            return template
        self._faults.append(f"{path!r} was saved by some ranks for themselves, and there is none for rank {self._rank}")
        return template

    def _bind_dict(self, node: Any, inside: list[Child], template: Any, path: str) -> Any:
        given: dict[Any, Any] = template if isinstance(template, dict) else {}
        if template is not ABSENT and not isinstance(template, dict) and _holds_memory(template):
            self._faults.append(f"{path!r} was saved as a dict, not as {type(template).__name__}")
            return template
        result: dict[Any, Any] = {}
        for child in inside:
            key = decode_key(child.key) if tag_of(node) == DICT else child.key
            value = self._bind(child.node, given.get(key, ABSENT), child.name)
            if value is not ABSENT:
                result[key] = value
        for key, value in given.items() if not self._exact else ():
            if key not in result:
                name = join(path, component(_as_json(key)))
                if self._strict and self._selected(name):
                    self._faults.append(f"{name!r} is not in the checkpoint")
                result[key] = value
        return result if result or self._selected(path) or not path or template is not ABSENT else ABSENT

    def _bind_sequence(self, node: Any, inside: list[Child], template: Any, path: str) -> Any:
        fits = isinstance(template, (list, tuple)) and len(template) == len(inside)
        if not fits and template is not ABSENT and _holds_memory(template):
            saved = f"{len(inside)} elements"
            self._faults.append(f"{path!r} was saved as {saved}, which {_short(template)} does not fit")
            return template
        given = list(template) if fits else [ABSENT] * len(inside)
        values = [self._bind(child.node, value, child.name) for child, value in zip(inside, given, strict=True)]
        if all(value is ABSENT for value in values) and (inside or not self._selected(path)):
            return ABSENT
        values = [None if value is ABSENT else value for value in values]
        return tuple(values) if tag_of(node) == TUPLE else values

    def _bind_module(self, node: Any, module: nn.Module, path: str) -> Any:
        inside = children(node, path)
        entries = module_entries(module)
        if inside is None or tag_of(node) == TUPLE or isinstance(node, list):
            self._faults.append(f"{path!r} was not saved as a module")
            return module
        saved = {child.name: child for child in inside if self._selected_below(child)}
        values: dict[str, Any] = {}
        known = set()
        for entry in entries:
            name = join(path, component(entry.name))
            known.add(name)
            if name in saved:
                # Extra state is whatever the module makes of it, and need not look as it does now.
                template = ABSENT if entry.key.endswith("_extra_state") else entry.value
                values[entry.key] = self._bind(saved[name].node, template, name)
            elif self._strict and self._selected(name):
                self._faults.append(f"{name!r} is not in the checkpoint")
        if self._strict:
            self._faults.extend(f"{name!r} is not in the module" for name in saved if name not in known)
        tensors = all(isinstance(value, torch.Tensor) for value in values.values())
        if values and not (tensors and owns_storage(module, entries)):
            self.finishers.append(lambda: _load_module(module, values, path))
        return module

    def _bind_whole(self, node: Any, target: Any, path: str, template: Any) -> Any:
        """An object whose state is handed to it as a whole."""
        if not self._selected(path):
            if any(self._selected(name) for name in tensor_names(node)):
                self._faults.append(f"{path!r} is loaded as a whole, and only= names a part of it")
            return target
        outer, self._exact = self._exact, True
        values = self._bind(node, template, path)
        self._exact = outer
        self.finishers.append(lambda: _hand_over(target, values, path))
        return target

    def _bind_leaf(self, node: Any, template: Any, path: str) -> Any:
        stored = self._catalog.find(node[tag_of(node)], self._rank)
        if stored.owner is not None and stored.owner != self._rank:
            self.taken_over.append(path)
        if isinstance(template, Place):
            place = template.make(stored.dtype, stored.shape)
            template = ABSENT if place is None else place
        if not isinstance(template, (torch.Tensor, np.ndarray, Sharded)):
            if template is not ABSENT and _holds_memory(template):
                self._faults.append(f"{path!r} was saved as a tensor, not as {type(template).__name__}")
                return template
            return self._make(stored, as_array=tag_of(node) == ARRAY)
        fault = fault_of(template)
        view = view_of(template) if fault is None else None
        if fault is not None:
            self._faults.append(f"{path!r} cannot be loaded into {fault}")
        elif view is not None:
            self._fill(stored, view, path)
        return template

    def _fill(self, stored: Stored, view: View, path: str) -> None:
        if (stored.dtype, stored.shape) != (view.dtype, view.shape):
            self._faults.append(
                f"{path!r} was saved as {stored.dtype} {list(stored.shape)}, not {view.dtype} {list(view.shape)}"
            )
        elif not _writable(view.local):
            self._faults.append(f"{path!r} cannot be filled: it is read-only, or elements share memory")
        else:
            self.fills.append(Fill(stored, view))

    def _make(self, stored: Stored, *, as_array: bool) -> Any:
        """A new tensor or array; one that is tied to another is the same object as that."""
        key = (stored.chunks or stored.name, as_array)
        if key not in self._made:
            dtype = torch_dtype(stored.dtype)
            if as_array or dtype is None:
                value: Any = np.empty(stored.shape, numpy_type(stored.dtype))
            else:
                value = torch.empty(stored.shape, dtype=dtype)
            view = view_of(value)
            assert view is not None
            self.fills.append(Fill(stored, view))
            self._made[key] = value
        return self._made[key]

    def _selected_below(self, child: Child) -> bool:
        return self._selected(child.name) or any(self._selected(name) for name in tensor_names(child.node))


def _has_containers(node: list[Any]) -> bool:
    return any(isinstance(item, (dict, list)) for item in node)


def _load_module(module: nn.Module, values: dict[str, Any], path: str) -> None:
    try:
        module.load_state_dict(values, strict=False)
    except RuntimeError as e:
        raise CheckpointMismatch(f"{path!r}: {e}") from e


def _hand_over(target: Any, values: Any, path: str) -> None:
    try:
        target.load_state_dict(values)
    except (KeyError, ValueError) as e:
        raise CheckpointMismatch(f"{path!r} does not take the saved state: {e}") from e


def _holds_memory(template: Any) -> bool:
    """Whether a template has tensors or objects that the caller expects to be filled."""
    if isinstance(template, (torch.Tensor, np.ndarray, Sharded)) or is_stateful(template):
        return True
    values: Iterable[Any] = ()
    if isinstance(template, dict):
        values = template.values()
    elif isinstance(template, (list, tuple)):
        values = template
    return any(_holds_memory(value) for value in values)


def _writable(local: Any) -> bool:
    if isinstance(local, np.ndarray):
        return bool(local.flags.writeable)
    return not any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True))


def _as_json(key: Any) -> Any:
    return key if isinstance(key, (str, int, float, bool, type(None))) else repr(key)


def _short(template: Any) -> str:
    return f"{type(template).__name__} of {len(template)}" if hasattr(template, "__len__") else type(template).__name__
