"""A writer of TFRecord files and ``tf.train.Example`` messages, made from their specifications and nothing of ours."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Values: TypeAlias = Sequence[bytes] | Sequence[float] | Sequence[int]

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def tfrecord(payloads: Iterable[bytes]) -> bytes:
    return b"".join(map(record, payloads))


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def sized(number: int, body: bytes) -> bytes:
    """A field of the length-delimited type."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def feature(kind: str, values: Values, *, packed: bool = True) -> bytes:
    """``kind``: ``bytes``, ``float`` or ``int64``."""
    if kind == "bytes":
        return sized(1, b"".join(sized(1, value) for value in values if isinstance(value, bytes)))
    if kind == "float":
        numbers = [struct.pack("<f", value) for value in values]
        body = sized(1, b"".join(numbers)) if packed and numbers else b"".join(b"\x0d" + n for n in numbers)
        return sized(2, body)
    numbers = [varint(int(value)) for value in values]
    body = sized(1, b"".join(numbers)) if packed and numbers else b"".join(b"\x08" + n for n in numbers)
    return sized(3, body)


def entry(name: str, body: bytes) -> bytes:
    return sized(1, sized(1, name.encode()) + sized(2, body))


def example(features: Mapping[str, tuple[str, Values]], *, packed: bool = True) -> bytes:
    """A ``tf.train.Example``; ``features``: the kind and the values of each."""
    entries = (entry(name, feature(kind, values, packed=packed)) for name, (kind, values) in features.items())
    return sized(1, b"".join(entries))
