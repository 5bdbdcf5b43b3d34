"""All formats, by name and in the order in which a shard's bytes are tried on them."""

from __future__ import annotations

from .abc import Format
from .arrow import Arrow
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

ORDER: tuple[type[Format], ...] = (
    WebDataset,
    Parquet,
    Arrow,
    TFRecord,
    Lmdb,
    Npy,
    Npz,
    LlmC,
    Megatron,
    Mds,
    LitData,
    Jsonl,
    Zarr,
)
"""Those with a magic number or a checksum first, those that are told by their structure last."""

_ALL: tuple[type[Format], ...] = (*ORDER, Files, Tokens, TokenFile)
KINDS: dict[str, type[Format]] = {kind.name: kind for kind in _ALL}
"""Every format, by the name that manifests write."""

BY_NAME: dict[str, type[Format]] = {kind.name: kind for kind in ORDER}
"""Those that can be named by a user, who gives no options."""
BY_NAME |= {"wds": WebDataset, "tar": WebDataset, "files": Files}
