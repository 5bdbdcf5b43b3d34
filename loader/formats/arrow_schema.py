"""What a table's schema says of its columns beyond their types: which hold encoded images."""

from __future__ import annotations

from typing import Any

import msgspec

_NAMES = frozenset({"jpg", "jpeg", "png", "webp", "image", "img"})


def image_columns(schema: Any) -> frozenset[str]:
    """The columns of encoded images: those that Hugging Face's description calls so, structs of ``bytes`` and ``path``
    and binary ones, by their names (`jpg`, `left.png`, `image` ...). Raises nothing."""
    described = _hugging_face_images(schema)
    return frozenset(field.name for field in schema if _holds_images(field, field.name in described))


def _holds_images(field: Any, described: bool) -> bool:
    import pyarrow as pa

    kind = field.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return described or field.name.rpartition(".")[2].lower() in _NAMES
    if not pa.types.is_struct(kind) or {part.name for part in kind} != {"bytes", "path"}:
        return False
    return described or field.name.rpartition(".")[2].lower() in _NAMES


def _hugging_face_images(schema: Any) -> frozenset[str]:
    """The names of the features of type ``Image`` in the metadata that ``datasets`` leaves in a schema."""
    try:
        document = msgspec.json.decode((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = document["info"]["features"]
        return frozenset(name for name, feature in features.items() if feature.get("_type") == "Image")
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()
