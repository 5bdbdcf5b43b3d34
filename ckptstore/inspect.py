"""What a step holds, as plain values for people and programs. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .catalog import Catalog
from .structure import children, tensor_name


def describe(catalog: Catalog) -> dict[str, Any]:
    """A step's tensors (in name order, sizes in bytes) and its values by name, as the structure writes them."""
    root = catalog.root
    return {
        "step": root.step,
        "generation": root.generation,
        "attempt": root.attempt,
        "world_size": root.world_size,
        "created": root.created,
        "metadata": root.metadata,
        "tensors": [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "bytes": t.nbytes,
                "chunks": len(t.chunks),
                "alias_of": t.alias_of,
                "rank": t.owner,
            }
            for t in sorted(catalog, key=lambda t: (t.name, t.owner or 0))
        ],
        "values": dict(_values(catalog.structure, "")),
    }


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = children(node, path)
    if inner:
        for child in inner:
            yield from _values(child.node, child.name)
    elif tensor_name(node) is None:
        yield path, node
