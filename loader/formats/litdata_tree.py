"""How the values of one LitData item are nested: the ``data_spec`` of an index, a torch pytree as JSON.

A node has a type (``builtins.dict``, ``builtins.list`` ...), a context (the keys of a dict) and children; a leaf has
none of them. Nothing that the text names is imported: an unknown type is an error, a named tuple becomes a tuple.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_DEEPEST = 64
_DICTS = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_LISTS = ("builtins.list", "collections.deque")
_TUPLES = ("builtins.tuple", "collections.namedtuple")


@dataclass(frozen=True, slots=True)
class Node:
    """``kind`` is ``leaf``, ``dict``, ``list`` or ``tuple``; ``leaves`` is how many leaves are in and below it."""

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()
    leaves: int = 1

    def build(self, values: Iterator[Any]) -> Any:
        """The nested value whose leaves are the next ones of ``values``."""
        if self.kind == "leaf":
            return next(values)
        built = [child.build(values) for child in self.children]
        if self.kind == "dict":
            return dict(zip(self.keys, built, strict=True))
        return tuple(built) if self.kind == "tuple" else built


LEAF = Node("leaf")


def parse_tree(text: str | None) -> Node:
    """The tree that ``data_spec`` describes; ``None`` is a single leaf. ``ValueError``: none, in words."""
    if text is None:
        return LEAF
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise ValueError("the data_spec is no JSON of a version and a tree") from None
    if version != 1:
        raise ValueError(f"the data_spec has version {version!r}; version 1 is read")
    return _node(tree, 0)


def _node(spec: Any, depth: int) -> Node:
    if depth > _DEEPEST:
        raise ValueError(f"the data_spec is nested more than {_DEEPEST} deep")
    if not isinstance(spec, dict) or not isinstance(spec.get("children_spec"), list):
        raise ValueError("the data_spec is malformed")
    name = spec.get("type")
    if name is None and not spec["children_spec"]:
        return LEAF
    children = tuple(_node(child, depth + 1) for child in spec["children_spec"])
    leaves = sum(child.leaves for child in children)
    if name in _DICTS:
        return Node("dict", _keys(spec.get("context"), len(children)), children, leaves)
    if name in _LISTS or name in _TUPLES:
        return Node("list" if name in _LISTS else "tuple", (), children, leaves)
    raise ValueError(f"the data_spec has the type {name!r}, which is not known")


def _keys(context: Any, count: int) -> tuple[Any, ...]:
    try:
        keys = context["dict_context"] if isinstance(context, dict) else json.loads(context)
    except (ValueError, TypeError, KeyError, RecursionError):
        keys = None
    plain = isinstance(keys, list) and all(key is None or isinstance(key, str | int | float) for key in keys)
    if not plain or len(keys) != count or len(set(keys)) != count:
        raise ValueError("the data_spec has a dict whose keys do not fit it")
    return tuple(keys)
