"""WebDataset: tar archives in which neighbouring members with the same key make one sample.

The rules are those of webdataset 1.0 (its ``tariterators``), so a data set reads here as it does there:

* Key and field split at the first dot of the member's base name; dots in directory names never count. ``a/b.seg.png``
  is the field ``seg.png`` of the sample ``a/b``. (``split="last"`` splits at the last dot instead.)
  A hidden file ``a/.jpg`` belongs to the sample ``a/``, unless its folder's name has a dot.
* Field names are lower-cased; keys are not. A leading ``./`` stays in the key. (Whoever asks for a field may write it
  in any case: in ``fields=``, in ``decode=`` and in ``sample["JPG"]``.)
* Neighbouring members with one key are one sample; the same key again further on is another sample.
* Directories, links and devices are passed over, and so are names whose first part is ``__...__``.

On purpose different:

* A member with no key (``README``, ``.hidden``) is skipped and counted, as there, but the count can be read.
* A member that repeats a field makes its own sample unreadable, with an error that names it, and no other one.
* A cut-off or overwritten archive is an error, never a silent end, and so are members behind zeros in its midst. Only
  the end marker may be missing, and an archive may have been joined to it, both with a warning.
* The sample's key is under ``__key__``, a ``str``; there is no ``__url__`` and no ``__local_path__``.

Values are views into the archive. An archive that is compressed as a whole (gzip, bzip2, xz, Zstandard; its first
bytes tell) is decompressed to memory first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from cachefs.errors import ConfigError, FormatError

from ..sample import FoldedSample, Sample
from .abc import Bytes, Format, KeptIndex, Ready, all_there
from .packed import unpack
from .tar import TarNotes, walk
from .tar_header import BLOCK, is_blank, is_tar
from .tar_index import TarIndex
from .tar_runs import RunFinder
from .tar_samples import KEY, TarSamples


@dataclass(frozen=True)
class WebDataset(Format):
    """Options of the format; ``split`` is ``"first"`` or ``"last"``: the dot at which a base name ends its key."""

    name: ClassVar[str] = "webdataset"
    streams: ClassVar[bool] = True
    kept_index: ClassVar[type[KeptIndex] | None] = TarIndex
    split: Literal["first", "last"] = "first"

    def __post_init__(self) -> None:
        if self.split not in ("first", "last"):
            raise ConfigError(f"split={self.split!r} is neither 'first' nor 'last'")

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        block = memoryview(head)[:BLOCK]
        return is_tar(block) or is_blank(block)

    @classmethod
    def is_plain(cls, head: bytes) -> bool:
        return is_tar(memoryview(head)[:BLOCK])  # a member's name may begin as a compressed file does

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        return data if is_tar(data[:BLOCK].data) else unpack(data, url, limit)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> TarIndex:
        samples, notes = TarSamples(last_dot=self.split == "last"), TarNotes()
        for path, header, start, size in walk(data.data, url, notes, ready, RunFinder(data, ready, samples.extend)):
            samples.add(path, header, start, size)
        return samples.index(notes.messages)

    def read(self, source: Bytes, index: TarIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        if index.damaged and i in index.damaged:
            raise index.damaged[i].error(FormatError, url)
        sample = FoldedSample()
        sample[KEY] = index.key(i)
        starts, sizes, names, table = index.starts, index.sizes, index.names, index.fields
        for m in range(index.first[i], index.first[i + 1]):
            name = table[names[m]]
            if fields is None or name in fields:
                start = starts[m]
                sample[name] = source[start : start + sizes[m]]
        return sample

    def kind(self, index: TarIndex, name: str) -> str:
        return "" if name == KEY else name.rpartition(".")[2]

    def canonical(self, name: str) -> str:
        return name.lower()
