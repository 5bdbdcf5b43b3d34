"""All formats, by name and in the order in which a shard's bytes are tried on them."""

from __future__ import annotations

from .abc import Format
from .llmc import LlmC
from .lmdb import Lmdb
from .mds import Mds
from .megatron import Megatron
from .tokens import Tokens
from .webdataset import WebDataset

ORDER: tuple[type[Format], ...] = (WebDataset, Lmdb, LlmC, Megatron, Mds)
"""Those with a magic number or a checksum first, those that are told by their structure last."""

_ALL: tuple[type[Format], ...] = (*ORDER, Tokens)
KINDS: dict[str, type[Format]] = {kind.name: kind for kind in _ALL}
"""Every format, by the name that manifests write."""

BY_NAME: dict[str, type[Format]] = {kind.name: kind for kind in ORDER}
"""Those that can be named by a user, who gives no options."""
BY_NAME |= {"wds": WebDataset, "tar": WebDataset}
