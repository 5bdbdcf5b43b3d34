"""What a table's schema says of its columns beyond their types: which hold encoded images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

_NAMES = frozenset({"jpg", "jpeg", "png", "webp", "image", "img"})


class Field(NamedTuple):
    """A column. ``binary``: whether its values are bytes; ``parts``: the names of a struct's fields."""

    name: str
    binary: bool
    parts: tuple[str, ...]


def arrow_fields(schema: Any) -> list[Field]:
    """The columns of a ``pyarrow.Schema``."""
    import pyarrow as pa

    return [
        Field(
            field.name,
            pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type),
            tuple(part.name for part in field.type) if pa.types.is_struct(field.type) else (),
        )
        for field in schema
    ]


def image_fields(fields: Iterable[Field], described: bytes | None) -> frozenset[str]:
    """The columns of encoded images: binary ones and structs of ``bytes`` and ``path``, that the description
    ``huggingface`` of the schema (``described``) or their names (``jpg``, ``left.png``, ``image``) call so."""
    images = _hugging_face_images(described)
    return frozenset(
        field.name
        for field in fields
        if (field.binary or set(field.parts) == {"bytes", "path"})
        and (field.name in images or field.name.rpartition(".")[2].lower() in _NAMES)
    )


def _hugging_face_images(described: bytes | None) -> frozenset[str]:
    """The names of the features of type ``Image`` in the metadata that ``datasets`` leaves in a schema."""
    try:
        features = msgspec.json.decode(described or b"{}")["info"]["features"]
        return frozenset(name for name, feature in features.items() if feature.get("_type") == "Image")
    # the description is no more than a hint: one that is damaged tells nothing
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()
