"""A state in Python, and its structure and tensors: :func:`flatten` one way, :func:`decode` back.

A state is a dict of anything that :mod:`.structure` lists, nested at will. Types are taken exactly: a subclass
(a named tuple, an enum, a default dict) would come back as something else, so it is refused with its path, as is every
other object, unless ``allow_pickle=True``. ``OrderedDict`` counts as a dict and comes back as one.
"""

from __future__ import annotations

import base64
import math
import pickle
import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from cachefs.errors import CheckpointError, CheckpointMismatch

from .dtypes import NUMPY_KINDS, NUMPY_PREFIX, numpy_type
from .leaves import Leaf, Sharded, fault_of
from .records import Rule
from .stateful import is_replicated, is_stateful, module_entries
from .structure import ARRAY, DICT, SIZE, TENSOR, TUPLE, component, join

MAX_DEPTH = 128
"""Deeper nesting is refused; JSON decoders elsewhere stop not far above."""

_EXACT = 1 << 53


class Flat(NamedTuple):
    """A state taken apart. ``structure`` is its JSON as it was at the moment of the call; the leaves still refer to
    the caller's live tensors and arrays. ``own``: names below which every rank keeps its own values."""

    structure: bytes
    leaves: tuple[Leaf, ...]
    own: tuple[str, ...]


def flatten(state: dict[Any, Any], *, allow_pickle: bool = False) -> Flat:
    """Take a state apart. Raises :class:`CheckpointMismatch` for what cannot be saved, naming its path."""
    if not isinstance(state, dict):
        raise CheckpointMismatch(f"a state is a dict, not {type(state).__name__}", hint='save {"model": model, ...}')
    flattener = _Flattener(allow_pickle)
    node = flattener.encode(state, "", "equal")
    return Flat(msgspec.json.encode(node), tuple(flattener.leaves), tuple(flattener.own))


class _Flattener:
    def __init__(self, allow_pickle: bool) -> None:
        self.leaves: list[Leaf] = []
        self.own: list[str] = []
        self._allow_pickle = allow_pickle
        self._open: set[int] = set()

    def encode(self, value: Any, path: str, rule: Rule) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if isinstance(value, (torch.Tensor, np.ndarray, Sharded)):
            return self._leaf(value, path, rule)
        if isinstance(value, np.generic):
            return {"$scalar": [_numpy_type(value, path), _base64(value.tobytes())]}
        if kind in (dict, OrderedDict, list, tuple) or is_stateful(value):
            if id(value) in self._open:
                raise CheckpointMismatch(f"{path!r} contains itself")
            if len(self._open) >= MAX_DEPTH:
                raise CheckpointMismatch(f"{path!r} is nested more than {MAX_DEPTH} deep")
            self._open.add(id(value))
            try:
                return self._container(value, path, rule)
            finally:
                self._open.remove(id(value))
        return self._other(value, path)

    def _container(self, value: Any, path: str, rule: Rule) -> Any:
        if isinstance(value, (list, tuple)):
            if all(map(_is_itself, value)):  # a long list of numbers needs no name for each
                return list(value) if isinstance(value, list) else {TUPLE: list(value)}
            items = [self.encode(v, join(path, component(i)), rule) for i, v in enumerate(value)]
            return items if isinstance(value, list) else {TUPLE: items}
        if isinstance(value, nn.Module):
            buffers: Rule = "first" if rule == "equal" and is_replicated(value) else rule
            entries = module_entries(value)
            return self._pairs([(e.name, e.value, buffers if e.buffer else rule) for e in entries], path)
        if isinstance(value, dict):
            return self._pairs([(k, v, rule) for k, v in value.items()], path)
        if getattr(value, "per_rank", False) is True:
            self.own.append(path)
            rule = "own"
        return self.encode(value.state_dict(), path, rule)

    def _pairs(self, items: list[tuple[Any, Any, Rule]], path: str) -> Any:
        keys = [_key(key, path) for key, _, _ in items]
        nodes = [
            self.encode(value, join(path, component(key)), rule)
            for key, (_, value, rule) in zip(keys, items, strict=True)
        ]
        if all(isinstance(key, str) and not key.startswith("$") and _is_text(key) for key in keys):
            return dict(zip(keys, nodes, strict=True))
        encoded = (_text(key) if isinstance(key, str) else key for key in keys)
        return {DICT: [list(pair) for pair in zip(encoded, nodes, strict=True)]}

    def _leaf(self, value: Any, path: str, rule: Rule) -> Any:
        fault = fault_of(value)
        if fault and self._allow_pickle:
            return self._other(value, path)
        if fault:
            raise CheckpointMismatch(f"{path!r} cannot be saved: {fault}")
        self.leaves.append(Leaf(path, value, rule))
        return {ARRAY if isinstance(value, np.ndarray) else TENSOR: path}

    def _other(self, value: Any, path: str) -> Any:
        if self._allow_pickle:
            try:
                return {"$pickle": _base64(pickle.dumps(value))}
            except (pickle.PicklingError, TypeError, AttributeError) as e:
                raise CheckpointMismatch(f"{path!r} cannot be pickled: {e}") from e
        kind = type(value)
        raise CheckpointMismatch(
            f"{path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            hint="save its plain values, give it state_dict and load_state_dict, or pass allow_pickle=True",
        )


def decode(node: Any, path: str, *, allow_pickle: bool = False) -> Any:
    """The Python value of a node that is neither container nor tensor."""
    if not isinstance(node, dict):
        return node
    ((tag, value),) = node.items()
    if tag == "$pickle":
        if not allow_pickle:
            raise CheckpointMismatch(
                f"{path!r} is a pickled object", hint="pass allow_pickle=True if you trust this checkpoint"
            )
        return pickle.loads(base64.b64decode(value))  # noqa: S301 - the caller asked for it by name
    if tag not in _DECODERS:
        raise CheckpointError(f"{path!r}: unknown kind of value {tag!r}", hint="written by a newer version?")
    try:
        return _DECODERS[tag](value)
    except (ValueError, TypeError, LookupError, RuntimeError) as e:
        raise CheckpointError(f"{path!r}: not a value of kind {tag!r}: {e}") from e


def decode_key(key: Any) -> Any:
    """The Python value of a ``$dict`` key."""
    return decode(key, "")


def _is_itself(value: Any) -> bool:
    """Whether a value's JSON is the value."""
    kind = type(value)
    if kind is int:
        return bool(-_EXACT <= value <= _EXACT)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool or (kind is str and _is_text(value))


def _key(key: Any, path: str) -> Any:
    """A dict key as JSON; text stays as it is."""
    kind = type(key)
    if kind is str:
        return key
    if kind in (int, float, bool, type(None), bytes):
        return _SCALARS[kind](key)
    raise CheckpointMismatch(f"{path!r} has a key {key!r} of type {kind.__name__}, which cannot be saved")


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _text(text: str) -> Any:
    return text if _is_text(text) else {"$text": _base64(text.encode("utf-8", "surrogatepass"))}


def _int(value: int) -> Any:
    return value if -_EXACT <= value <= _EXACT else {"$int": _decimal(value)}


def _decimal(value: int) -> str:
    # str() of an int refuses more than 4300 digits; hexadecimal does not.
    return str(value) if value.bit_length() < 10_000 else hex(value)


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"$float": "inf" if value > 0 else "-inf"}
    bits = struct.pack(">d", value).hex()
    return {"$float": "nan" if bits == "7ff8000000000000" else f"nan:{bits}"}


def _float_back(value: Any) -> float:
    if isinstance(value, dict):
        value = value["$float"]
    if isinstance(value, str) and value.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(value[4:]))[0])
    return float(value)


def _dtype_back(value: str) -> torch.dtype:
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no type {value!r}")
    return dtype


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy_type(value: np.generic, path: str) -> str:
    if value.dtype.kind not in NUMPY_KINDS:
        raise CheckpointMismatch(f"{path!r} is a numpy scalar of type {value.dtype}, which cannot be saved")
    return value.dtype.str


def _scalar(value: list[str]) -> Any:
    return np.frombuffer(base64.b64decode(value[1]), numpy_type(NUMPY_PREFIX + value[0]))[0]


_SCALARS: dict[type, Any] = {
    type(None): lambda v: v,
    bool: lambda v: v,
    int: _int,
    float: _float,
    str: _text,
    complex: lambda v: {"$complex": [_float(v.real), _float(v.imag)]},
    bytes: lambda v: {"$bytes": _base64(v)},
    bytearray: lambda v: {"$bytearray": _base64(v)},
    torch.dtype: lambda v: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"$device": str(v)},
    torch.Size: lambda v: {SIZE: list(v)},
}

_DECODERS: dict[str, Any] = {
    "$int": lambda v: int(v, 0),
    "$float": _float_back,
    "$complex": lambda v: complex(_float_back(v[0]), _float_back(v[1])),
    "$bytes": base64.b64decode,
    "$bytearray": lambda v: bytearray(base64.b64decode(v)),
    "$text": lambda v: base64.b64decode(v).decode("utf-8", "surrogatepass"),
    "$scalar": _scalar,
    "$dtype": _dtype_back,
    "$device": torch.device,
    SIZE: torch.Size,
}
