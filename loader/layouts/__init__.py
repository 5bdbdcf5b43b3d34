"""What a folder holds besides shards: the indexes and descriptions that other tools leave beside their data.

A layout looks at a folder's listing. If the folder is one that its tool wrote, it tells which objects are shards, in
which format, and, where the tool wrote them down, how many samples each holds, so that nothing need be read for it.
"""

from __future__ import annotations

from .abc import Folder, Found, Layout
from .energon import energon_layout
from .huggingface import hugging_face_layout
from .litdata_index import litdata_layout
from .mds_index import mds_layout
from .wids import wids_layout
from .zarr_store import zarr_layout

LAYOUTS: tuple[Layout, ...] = (
    mds_layout,
    litdata_layout,
    energon_layout,
    wids_layout,
    zarr_layout,
    hugging_face_layout,
)
"""In the order in which a folder is tried on them; the first that knows it decides."""

__all__ = ["LAYOUTS", "Folder", "Found", "Layout"]
