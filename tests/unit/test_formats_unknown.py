"""A shard in no known format: the error says what it looks like and what to do."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import numpy as np
import pytest

from cachefs.errors import ConfigError, UnknownFormat
from loader import formats
from loader.formats import detect_bytes, resolve
from loader.formats.magic import image_kind

JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(600)
WEBP = b"RIFF\x00\x01\x00\x00WEBPVP8 " + bytes(600)


def said(data: bytes) -> str:
    with pytest.raises(UnknownFormat) as raised:
        detect_bytes(np.frombuffer(data, np.uint8), "x.bin")
    return str(raised.value)


@pytest.mark.parametrize(
    ("data", "looks", "way_out"),
    [
        (JPEG, "looks like an image (jpeg)", 'format="files"'),
        (WEBP, "looks like an image (webp)", 'format="files"'),
        (b"\x89PNG\r\n\x1a\n" + bytes(600), "looks like an image (png)", 'format="files"'),
        (b"id,label\n1,cat\n2,dog\n", "looks like CSV", "convert it to JSON Lines (one object a line) or Parquet"),
        (b"id\tlabel\r\n1\tcat\r\n", "looks like CSV", "Parquet"),
        (b"\xef\xbb\xbfid;label\n1;cat\n", "looks like CSV", "Parquet"),
        (json.dumps([{"a": 1}, {"a": 2}]).encode(), "looks like one JSON document", "one object a line"),
        (json.dumps([{"a": i} for i in range(2000)]).encode(), "looks like one JSON document", "one object a line"),
        (json.dumps({"rows": [1, 2]}, indent=2).encode(), "looks like one JSON document", "one object a line"),
        (json.dumps({"a": ["é"] * 3000}, indent=1, ensure_ascii=False).encode(), "looks like one JSON", "a line"),
        ("prose, which has a comma\nand another line é".encode(), "looks like text", 'format="files"'),
        (b"FEA1" + bytes(600), "looks like Feather 1, which is not read", "Feather 2"),
        (bytes(range(1, 256)) * 3, "no known format fits the bytes", "formats.Tokens(length=2048"),
    ],
)
def test_the_error_says_what_it_looks_like_and_what_to_do(data: bytes, looks: str, way_out: str) -> None:
    assert looks in said(data) and way_out in said(data)
    assert said(data).count("\n") == 0


def test_a_compressed_file_is_looked_into() -> None:
    text = said(gzip.compress(b"id,label\n1,cat\n2,dog\n"))
    assert "a gzip file that holds no known format; it looks like CSV" in text and "Parquet" in text
    assert said(gzip.compress(bytes(range(1, 256)) * 3)).endswith("a gzip file that holds no known format")


def test_deep_json_is_no_trouble() -> None:
    assert "one JSON document" in said(b"[" * 100_000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_images_as_pillow_writes_them_are_told(kind: str) -> None:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (3, 2)).save(out, kind)
    assert image_kind(out.getvalue()[:16]) == kind.lower()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (formats.WebDataset, r"write formats\.WebDataset\(\)"),
        (formats.Tokens, r"formats\.Tokens\(length=2048"),
        ("Tokens", r"known: webdataset, .*and tokens, written formats\.Tokens\(length"),
        (3, "known: webdataset"),
    ],
)
def test_a_format_that_cannot_be_named_so_says_how(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(given)
