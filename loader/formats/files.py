"""Plain files: every object is one sample, its bytes as they are, whatever they hold.

Nothing in a file says that it is meant so; the format is never found by itself and has to be asked for
(``format="files"``). The fields are those of a WebDataset member of the same name: the base name ends its key at its
first dot, and what follows, in lower case, names the one field, a view of the file's bytes; ``decode=`` knows it by the
part behind its last dot. ``__key__`` also holds the folder's name, for that often is the class: ``cats/0001`` for
``.../cats/0001.JPG``, whose field is ``jpg``. A file without a suffix has the field ``data``.

On purpose different from WebDataset: two files with one key are two samples, names of any kind are read (``README``,
``.hidden``), and nothing is decompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cachefs.errors import ConfigError

from ..sample import FoldedSample, Sample
from .abc import Bytes, Format, Ready, SampleIndex, all_there

_KEY = "__key__"
_NO_SUFFIX = "data"


@dataclass(frozen=True, slots=True)
class OneSample(SampleIndex):
    """The whole object."""

    def __len__(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        return 64


@dataclass(frozen=True)
class Files(Format):
    """Options of the format. ``split`` is ``"first"`` or ``"last"``: the dot at which a base name ends its key.
    ``folders``: how many of the folders above a file its key names."""

    name: ClassVar[str] = "files"
    split: Literal["first", "last"] = "first"
    folders: int = 1

    def __post_init__(self) -> None:
        if self.split not in ("first", "last"):
            raise ConfigError(f"split={self.split!r} is neither 'first' nor 'last'")
        if isinstance(self.folders, bool) or not isinstance(self.folders, int) or self.folders < 0:
            raise ConfigError(f"Files(folders={self.folders!r}) is no number of folders")

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> OneSample:
        return OneSample()

    def count(self, size: int, url: str) -> int:
        return 1

    def read(self, source: Bytes, index: OneSample, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        key, name = self._names(url)
        sample = FoldedSample({_KEY: key})
        if fields is None or name in fields:
            sample[name] = source
        return sample

    def takes(self, file: str) -> bool:
        return True

    def kind(self, index: Any, name: str) -> str:
        return "" if name == _KEY else name.rpartition(".")[2]

    def canonical(self, name: str) -> str:
        return name.lower()

    def _names(self, url: str) -> tuple[str, str]:
        folder, _, base = url.rpartition("://")[2].rpartition("/")
        dot = base.rfind(".") if self.split == "last" else base.find(".")
        stem, suffix = (base[:dot], base[dot + 1 :].lower()) if dot > 0 else (base, "")
        above = [part for part in folder.split("/") if part][-self.folders :] if self.folders else []
        return "/".join([*above, stem]), suffix or _NO_SUFFIX
