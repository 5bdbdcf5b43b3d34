"""What ``decode=`` of a data set means: which field becomes what.

What a field holds is told by the last part of its name in a tar (``seg.png`` is a ``png``), by the format itself
elsewhere; in no other way does a field's name matter.

========================================== ==================== =================== ===================================
kind                                       ``decode=None``      ``"pil"``           ``"torch"``
========================================== ==================== =================== ===================================
``txt text transcript``                    ``str``              ``str``             ``str``
``cls cls2 class count index inx id``      ``int``              ``int``             ``int``
``json jsn``                               object               object              object
``npy``                                    array view           array view          tensor
``jpg jpeg png ppm pgm pbm pnm webp bmp    as it is             ``PIL.Image``       tensor (channels, height, width)
tif tiff gif``
``pil`` (MDS), ``image`` (``{bytes,        as it is             ``PIL.Image``       tensor (channels, height, width)
path}`` of Parquet and Arrow)
``pt pth``                                 refused              refused             tensors, loaded ``weights_only``
``pkl pickle pyd``                         refused              refused             refused
all others                                 as it is             as it is            arrays become tensors
========================================== ==================== =================== ===================================

``decode="bytes"`` leaves every field as it is. ``decode={field: f}`` is as ``None``, but these fields become
``f(value)``, whatever they hold. A field that is refused is an error that names it: loading a pickle runs code that
the file chooses, so either it is not read (``fields=``), or not decoded (``"bytes"``), or by a function of the user's.

A null stays ``None`` and reaches no function. A value that cannot be decoded is a :class:`FormatError` that names
shard, sample and field.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from cachefs.errors import ConfigError, DataError, FormatError

from .decoders import (
    array_to_tensor,
    image_to_tensor,
    load_tensors,
    raw_image_to_tensor,
    raw_to_pil,
    to_array,
    to_int,
    to_json,
    to_pil,
    to_tensor,
    to_text,
)
from .formats.magic import image_kind
from .reader import DataWarning

if TYPE_CHECKING:
    from .formats import Format
    from .sample import Sample

Decoder: TypeAlias = Callable[[Any], Any]
DecodeOption: TypeAlias = Literal["bytes", "pil", "torch"] | Mapping[str, Decoder] | None


class Decoded(Protocol):
    """The shard whose fields are decoded (:class:`loader.opening.OpenShard`)."""

    @property
    def url(self) -> str: ...

    @property
    def format(self) -> Format: ...

    @property
    def index(self) -> Any: ...

    @property
    def decoders(self) -> dict[str, Decoder | None]:
        """What decodes each field, as far as that was asked."""


_TEXT = frozenset({"txt", "text", "transcript"})
_NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_JSON = frozenset({"json", "jsn"})
_IMAGE = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff", "gif", "image"})
_RAW_IMAGE = frozenset({"pil"})
_ARRAY = frozenset({"npy"})
_TENSORS = frozenset({"pt", "pth"})
_PICKLE = frozenset({"pkl", "pickle", "pyd"})


def _table(*rows: tuple[frozenset[str], Callable[[Any], Any]]) -> dict[str, Callable[[Any], Any]]:
    return {kind: decoder for kinds, decoder in rows for kind in kinds}


_PLAIN = _table((_TEXT, to_text), (_NUMBER, to_int), (_JSON, to_json), (_ARRAY, to_array))
_PIL = _PLAIN | _table((_IMAGE, to_pil), (_RAW_IMAGE, raw_to_pil))
_TORCH = _PLAIN | _table(
    (_IMAGE, image_to_tensor), (_RAW_IMAGE, raw_image_to_tensor), (_ARRAY, array_to_tensor), (_TENSORS, load_tensors)
)
_BY_MODE = {None: _PLAIN, "pil": _PIL, "torch": _TORCH}


class Decode:
    """One data set's decode step. Picklable if the user's own decoders are."""

    def __init__(self, option: DecodeOption, canonical: Callable[[str], str] = str) -> None:
        if not (option is None or option in ("bytes", "pil", "torch") or isinstance(option, Mapping)):
            raise ConfigError(
                f"decode={option!r} is not known", hint='use "bytes", "pil", "torch" or {field: function}'
            )
        if isinstance(option, Mapping) and not all(callable(f) for f in option.values()):
            raise ConfigError("decode={...} holds something that is no function")
        own = option if isinstance(option, Mapping) else {}
        self._own = {canonical(name): f for name, f in own.items()}
        if len(self._own) < len(own):
            raise ConfigError(f"decode={{...}} names a field twice: {', '.join(own)}", hint="letter case is no matter")
        self._mode = option if isinstance(option, str) else None
        self._wary = self._mode in ("pil", "torch")

    @property
    def idle(self) -> bool:
        """Whether no field of any format is ever changed."""
        return self._mode == "bytes"

    @property
    def keeps_arrays(self) -> bool:
        """Whether a value that is an array stays as it is."""
        return not self._wary and not self._own

    @property
    def common(self) -> bool:
        """Whether no field goes through a function of the user's own."""
        return not self._own

    def __call__(self, sample: Sample, shard: Decoded, i: int) -> None:
        """Replace the fields of sample ``i`` that are to be decoded by their values. Raises ``FormatError``."""
        table = shard.decoders
        if self._wary:
            self._wary = False
            self._look_for_images(sample, shard)
        for name, value in sample.items():
            decoder = table[name] if name in table else self.decoder(name, shard)
            if decoder is not None:
                # replacing the value of a key that is there keeps the iteration valid
                sample[name] = self.value(decoder, value, name, shard, i)

    def _look_for_images(self, sample: Sample, shard: Decoded) -> None:
        """Warn, of the first sample, if images were asked for and none is decoded though one seems to be there.

        One worker speaks for all.
        """
        if _number_of_this_worker() > 0:
            return
        found = {name: image_kind(_head(value)) for name, value in sample.items()}
        if any(shard.format.kind(shard.index, name) in _IMAGE | _RAW_IMAGE for name in found):
            return
        name = next((name for name, kind in found.items() if kind), None)
        if name is not None:
            # one text for all shards and epochs, so that Python's own filter says it once
            warnings.warn(
                f"decode={self._mode!r} decodes no image, though the field {name!r} begins like one ({found[name]}): "
                f"what a field of {shard.format.name} data holds is told by its name or type, and this one's does not "
                f"(decode={{{name!r}: f}} makes it f(bytes))",
                DataWarning,
                stacklevel=3,
            )

    def decoder(self, name: str, shard: Decoded) -> Decoder | None:
        """What decodes this field of the shard's samples; ``None`` if it stays as it is."""
        table = shard.decoders
        if name not in table:
            table[name] = self._choose(name, shard)
        return table[name]

    def value(self, decoder: Decoder, value: Any, name: str, shard: Decoded, i: int) -> Any:
        """One value decoded; a null stays one. Raises ``FormatError`` that names sample and field."""
        if value is None:
            return None
        try:
            return decoder(value)
        except ConfigError:
            raise
        # a decoder is the user's or an image library's: whatever it raises on damaged bytes, the sample is bad
        except Exception as e:
            reason = e.what if isinstance(e, DataError) else f"{type(e).__name__}: {e}"
            first_line = reason.partition("\n")[0]
            raise FormatError(f"field {name!r} of sample {i} cannot be decoded: {first_line}", url=shard.url) from e

    def _choose(self, name: str, shard: Decoded) -> Decoder | None:
        if name in self._own:
            return self._own[name]
        if self._mode == "bytes" or name.startswith("__"):
            return None
        kind = shard.format.kind(shard.index, name)
        table = _BY_MODE[self._mode]
        if kind in table:
            return table[kind]
        if kind in _PICKLE or kind in _TENSORS:
            return _refusal(name, kind, shard.url)
        return to_tensor if self._mode == "torch" else None


def _head(value: Any) -> bytes:
    """How a value begins that stands for bytes; of any other nothing."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[:16])
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8:
        return value[:16].tobytes()
    return b""


def _number_of_this_worker() -> int:
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    return 0 if worker is None else int(worker.id)


def _refusal(name: str, kind: str, url: str) -> Decoder:
    hint = f"leave it out with fields=[...], or decode={{{name!r}: f}}, or decode='bytes'"
    if kind in _TENSORS:
        hint += ", or decode='torch', which loads tensors and nothing else"

    def refuse(value: Any) -> Any:
        raise ConfigError(f"field {name!r} is a pickle, and loading one runs what it says", url=url, hint=hint)

    return refuse


def plain_kind(kind: str) -> str:
    """What a field of this kind becomes where nothing else is asked: ``"text"``, ``"number"``, ``"json"``, or
    ``""``, which stays as it is."""
    for name, kinds in (("text", _TEXT), ("number", _NUMBER), ("json", _JSON)):
        if kind in kinds:
            return name
    return ""
