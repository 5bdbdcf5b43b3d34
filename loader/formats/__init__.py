"""The formats that shards are read in, one class each, and how the bytes of a shard tell its own.

``format=`` of :class:`loader.ShardDataset` takes a name (``"webdataset"``, ``"mds"`` ...), an object of one of these
classes, which has options, or nothing: then the bytes decide.
"""

from __future__ import annotations

from .abc import Format, SampleIndex
from .arrow import Arrow
from .detect import detect, detect_bytes, resolve
from .files import Files
from .jsonl import Jsonl
from .litdata import LitData
from .llmc import LlmC
from .lmdb import Lmdb
from .mds import Mds
from .megatron import Megatron
from .npy import Npy
from .npz import Npz
from .parquet import Parquet
from .tfrecord import TFRecord
from .tokenfile import TokenFile
from .tokens import Tokens
from .webdataset import WebDataset
from .zarr import Zarr

__all__ = [
    "Arrow",
    "Files",
    "Format",
    "Jsonl",
    "LitData",
    "LlmC",
    "Lmdb",
    "Mds",
    "Megatron",
    "Npy",
    "Npz",
    "Parquet",
    "SampleIndex",
    "TFRecord",
    "TokenFile",
    "Tokens",
    "WebDataset",
    "Zarr",
    "detect",
    "detect_bytes",
    "resolve",
]
