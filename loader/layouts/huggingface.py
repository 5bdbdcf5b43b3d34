"""The folders that ``save_to_disk`` of Hugging Face's ``datasets`` writes.

A data set is ``state.json``, which lists the Arrow files in order, beside ``dataset_info.json``; a dictionary of data
sets is ``dataset_dict.json``, which names the folders of its splits. Splits are not mixed: one has to be named.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cachefs.errors import ConfigError, FormatError

from ..formats import Arrow
from .abc import Folder, Found

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_File] = msgspec.field(name="_data_files")
    indices: list[Any] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def hugging_face_layout(folder: Folder) -> Found | None:
    """The Arrow files of a saved data set, in the order of its rows."""
    if not (folder.format is None or isinstance(folder.format, Arrow)):
        return None
    if f"{folder.url}/{STATE}" in folder.by_url and f"{folder.url}/{INFO}" in folder.by_url:
        return _saved(folder)
    if f"{folder.url}/{SPLITS}" in folder.by_url and any(item.url.endswith(f"/{STATE}") for item in folder.listed):
        splits = _read(folder, SPLITS, _Splits).splits
        raise ConfigError(
            f"a dictionary of data sets: {', '.join(splits)}",
            url=folder.url,
            hint=f"name one of them: {folder.url}/{splits[0] if splits else 'train'}",
        )
    return None


def _saved(folder: Folder) -> Found:
    state = _read(folder, STATE, _State)
    if state.indices:
        raise FormatError(
            "a data set whose rows are chosen by an indices mapping, which is not read",
            url=f"{folder.url}/{STATE}",
            hint="save it again with a newer version of datasets, or after flatten_indices()",
        )
    stats = []
    for file in state.files:
        stat = folder.by_url.get(f"{folder.url}/{file.filename}")
        if stat is None:
            raise FormatError(f"names {file.filename!r}, which is not in the folder", url=f"{folder.url}/{STATE}")
        stats.append(stat)
    return Found(tuple(stats), Arrow())


def _read(folder: Folder, name: str, kind: type[Any]) -> Any:
    url = f"{folder.url}/{name}"
    try:
        return msgspec.json.decode(folder.read(url), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise FormatError(f"not readable as datasets writes it: {e}", url=url) from e
