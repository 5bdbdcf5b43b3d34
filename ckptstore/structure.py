"""The JSON of a state: containers and values, with tensors referred to by name. No torch in here.

A plain dict is a JSON object, a list an array; ``null``, ``true``, text, finite floats and integers up to 2^53 are
themselves. Everything else is an object with one key that begins with ``$``:

================  ====================================================================================================
``$tensor``       name of a torch tensor;  ``$array``: name of a numpy array
``$dict``         ``[[key, value], ...]``: a dict whose keys are not all text, or of which one begins with ``$``
``$tuple``        elements;  ``$size``: a ``torch.Size``
``$int``          decimal text of a larger integer
``$float``        ``"nan"``, ``"inf"``, ``"-inf"``, or ``"nan:<16 hex>"`` for a NaN with other bits
``$complex``      ``[real, imaginary]``, each as a float
``$bytes``        base64;  ``$bytearray`` likewise;  ``$text``: base64 of UTF-8 with lone surrogates
``$scalar``       ``[numpy type, base64]``
``$dtype``        ``"bfloat16"``;  ``$device``: ``"cuda:0"``
``$pickle``       base64 (only with ``allow_pickle=True``)
``$ranks``        ``[[[rank, ...], value], ...]``: ranks keep different values
================  ====================================================================================================

**Names.** A tensor's name is its path: keys joined by ``/``. In a text key ``%``, ``/``, ``#``, control characters and
lone surrogates are written ``%XX`` (UTF-8 bytes), an empty one is ``%empty``, and a whole name that would read
``__metadata__``, which safetensors reserves, begins with ``%5F`` instead. Any other key, and a list index, is ``#`` and
its text: the integer ``0`` is ``#0``, the text ``"0"`` is ``0``. So no two paths share a name.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from typing import Any, NamedTuple

import msgspec

TENSOR, ARRAY, DICT, TUPLE, SIZE, RANKS = "$tensor", "$array", "$dict", "$tuple", "$size", "$ranks"

_UNSAFE = re.compile(r"[%/#\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def component(key: Any) -> str:
    """One key or list index as a part of a name. ``key`` is text or as its JSON reads."""
    if isinstance(key, dict) and "$text" in key:
        key = base64.b64decode(key["$text"]).decode("utf-8", "surrogatepass")
    if not isinstance(key, str):
        return f"#{_UNSAFE.sub(_percent, _key_text(key))}"
    return _UNSAFE.sub(_percent, key) or "%empty"


def join(path: str, part: str) -> str:
    """The name one level down; ``path`` is empty at the root."""
    if path:
        return f"{path}/{part}"
    return f"%5F{part[1:]}" if part == "__metadata__" else part


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{b:02X}" for b in match[0].encode("utf-8", "surrogatepass"))


def _key_text(key: Any) -> str:
    if isinstance(key, dict):
        ((tag, value),) = key.items()
        return f"{tag[1:]}:{value}"
    return msgspec.json.encode(key).decode()


class Child(NamedTuple):
    """One element of a container: its key as its JSON reads (an index in a sequence), its name, and its JSON."""

    key: Any
    name: str
    node: Any


def tag_of(node: Any) -> str | None:
    """The tag of a tagged object."""
    if isinstance(node, dict) and len(node) == 1:
        (key,) = node
        return key if key.startswith("$") else None
    return None


def children(node: Any, path: str) -> list[Child] | None:
    """The elements of a dict, list or tuple; ``None`` for everything else."""
    tag = tag_of(node)
    if tag == DICT:
        return [Child(key, join(path, component(key)), value) for key, value in node[DICT]]
    if isinstance(node, dict) and tag is None:
        return [Child(k, join(path, component(k)), v) for k, v in node.items()]
    items = node[TUPLE] if tag == TUPLE else node
    if isinstance(items, list):
        return [Child(i, join(path, component(i)), v) for i, v in enumerate(items)]
    return None


def with_children(node: Any, kept: Sequence[Child]) -> Any:
    """A container of the same kind with these elements."""
    tag = tag_of(node)
    if tag == DICT:
        return {DICT: [[c.key, c.node] for c in kept]}
    if tag == TUPLE:
        return {TUPLE: [c.node for c in kept]}
    return [c.node for c in kept] if isinstance(node, list) else {c.key: c.node for c in kept}


def tensor_name(node: Any) -> str | None:
    """The name that a tensor or array node refers to."""
    tag = tag_of(node)
    return node[tag] if tag in (TENSOR, ARRAY) else None


def tensor_names(node: Any) -> Iterator[str]:
    """All tensors that a structure refers to."""
    name = tensor_name(node)
    if name is not None:
        yield name
    elif tag_of(node) == RANKS:
        for _, value in node[RANKS]:
            yield from tensor_names(value)
    else:
        for child in children(node, "") or ():
            yield from tensor_names(child.node)


class Selector:
    """Which names are asked for: globs in which ``*`` also crosses ``/``; a name selects all that is below it."""

    def __init__(self, patterns: str | Iterable[str] | None) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns) if patterns is not None else None
        globs = [g for p in self.patterns or () for g in (p, f"{p.rstrip('/')}/*")]
        self._match = re.compile("|".join(map(translate, globs))) if globs else None

    @property
    def all(self) -> bool:
        """Whether everything is asked for."""
        return self.patterns is None

    def __call__(self, name: str) -> bool:
        return self.patterns is None or (self._match is not None and self._match.match(name) is not None)


NOTHING = object()
"""What is left of a node of which nothing is asked for."""


def prune(node: Any, selected: Callable[[str], bool], path: str = "") -> Any:
    """The structure cut down to the selected names; :data:`NOTHING` if none are.

    Dicts lose the other keys. In lists and tuples what is left out becomes ``null``, so that indices stay.
    """
    inner = children(node, path)
    if inner is None:
        return node if selected(path) else NOTHING
    kept = [c._replace(node=prune(c.node, selected, c.name)) for c in inner]
    if all(c.node is NOTHING for c in kept) and not (path and selected(path)):
        return NOTHING
    if isinstance(node, dict) and tag_of(node) != TUPLE:
        return with_children(node, [c for c in kept if c.node is not NOTHING])
    return with_children(node, [c._replace(node=None) if c.node is NOTHING else c for c in kept])


Conflict = tuple[str, list[tuple[int, ...]]]
"""A name and the groups of ranks that have different values there."""

_Ranked = tuple[tuple[int, ...], Any]


class Merged(NamedTuple):
    """Structures of several ranks joined, and where they differ without leave."""

    node: Any
    conflicts: list[Conflict]


def merge(nodes: Sequence[tuple[tuple[int, ...], Any]], may_differ: Callable[[str], bool]) -> Merged:
    """Join the structures of groups of ranks.

    Dicts are joined key by key (a key may be on some ranks only: their own layers, say); sequences must be equally
    long. Other values must be equal, or become a ``$ranks`` node where ``may_differ(name)``.
    """
    conflicts: list[Conflict] = []
    return Merged(_merge(list(nodes), "", may_differ, conflicts), conflicts)


def _merge(nodes: list[_Ranked], path: str, may_differ: Callable[[str], bool], conflicts: list[Conflict]) -> Any:
    groups: dict[bytes, _Ranked] = {}
    for ranks, node in nodes:
        text = msgspec.json.encode(node)  # not ==: to Python 1, 1.0 and True are equal
        groups[text] = (tuple(sorted(groups[text][0] + ranks)) if text in groups else ranks, node)
    distinct = list(groups.values())
    if len(distinct) == 1:
        return distinct[0][1]
    kind = _common_container([node for _, node in distinct])
    if kind is None:
        if not may_differ(path):
            conflicts.append((path, [ranks for ranks, _ in distinct]))
        return {RANKS: [[list(ranks), node] for ranks, node in distinct]}
    columns: dict[str, list[tuple[tuple[int, ...], Child]]] = {}
    for ranks, node in distinct:
        for child in children(node, path) or ():
            columns.setdefault(child.name, []).append((ranks, child))
    joined = (
        column[0][1]._replace(node=_merge([(r, c.node) for r, c in column], name, may_differ, conflicts))
        for name, column in columns.items()
    )
    return with_children(kind, list(joined))


def _common_container(nodes: list[Any]) -> Any:
    """An example of the container that all of these can be joined to, or ``None``."""
    if all(isinstance(n, dict) and tag_of(n) in (None, DICT) for n in nodes):
        return next((n for n in nodes if tag_of(n) == DICT), nodes[0])
    for kind in (lambda n: isinstance(n, list), lambda n: tag_of(n) == TUPLE):
        if all(map(kind, nodes)) and len({len(children(n, "") or ()) for n in nodes}) == 1:
            return nodes[0]
    return None
