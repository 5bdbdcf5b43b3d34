"""From stored bytes to values: what ``decode=`` of a data set means.

==================  ===================================================================================================
``None``            text, class and JSON fields of a tar become ``str``, ``int`` and objects; the rest stays as it is
``"bytes"``         nothing is decoded: every field of a tar is a ``uint8`` view
``"pil"``           as ``None``, and images become ``PIL.Image`` (needs pillow)
``"torch"``         as ``None``, and images become ``uint8`` tensors (channels, height, width), arrays become tensors
``{field: f}``      as ``None``, but the named fields become ``f(view)``
==================  ===================================================================================================

What a field holds is told by the last part of its name in a tar (``seg.png`` is a ``png``), by the column's encoding in
MDS. A value that cannot be decoded is a :class:`FormatError` that names shard and field.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from cachefs.errors import ConfigError, FormatError

if TYPE_CHECKING:
    import torch

    from .opening import OpenShard
    from .sample import Sample

Decoder: TypeAlias = Callable[[Any], Any]
DecodeOption: TypeAlias = Literal["bytes", "pil", "torch"] | Mapping[str, Decoder] | None

_TEXT = frozenset({"txt", "text", "transcript"})
_NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_JSON = frozenset({"json", "jsn"})
_IMAGE = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff", "gif"})
_RAW_IMAGE = "pil"


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
        self._mode = option if isinstance(option, str) else None

    @property
    def idle(self) -> bool:
        """Whether no field of any format is ever changed."""
        return self._mode == "bytes"

    @property
    def common(self) -> bool:
        """Whether no field goes through a function of the user's own."""
        return not self._own

    def __call__(self, sample: Sample, shard: OpenShard, i: int) -> None:
        """Replace the fields of sample ``i`` that are to be decoded by their values. Raises ``FormatError``."""
        for name, value in sample.items():
            decoder = self.decoder(name, shard)
            if decoder is not None:
                # replacing the value of a key that is there keeps the iteration valid
                sample[name] = self.value(decoder, value, name, shard, i)

    def decoder(self, name: str, shard: OpenShard) -> Decoder | None:
        """What decodes this field of the shard's samples; ``None`` if it stays as it is."""
        table = shard.decoders
        try:
            return table[name]
        except KeyError:
            decoder = table[name] = self._choose(name, shard)
            return decoder

    def value(self, decoder: Decoder, value: Any, name: str, shard: OpenShard, i: int) -> Any:
        """One value decoded. Raises ``FormatError`` that names sample and field."""
        try:
            return decoder(value)
        except ConfigError:
            raise
        # a decoder is the user's or an image library's: whatever it raises on damaged bytes, the sample is bad
        except Exception as e:
            raise FormatError(
                f"field {name!r} of sample {i} cannot be decoded: {type(e).__name__}: {e}", url=shard.url
            ) from e

    def _choose(self, name: str, shard: OpenShard) -> Decoder | None:
        if name in self._own:
            return self._own[name]
        if self._mode == "bytes" or name.startswith("__"):
            return None
        kind = shard.format.kind(shard.index, name)
        if self._mode == "torch":
            return _torch_decoder(kind)
        if self._mode == "pil" and (kind in _IMAGE or kind == _RAW_IMAGE):
            return to_pil if kind in _IMAGE else raw_to_pil
        return _light_decoder(kind)


def plain_kind(kind: str) -> str:
    """What a field of this kind becomes where nothing else is asked: ``"text"``, ``"number"``, ``"json"``, or
    ``""``, which stays as it is."""
    for name, kinds in (("text", _TEXT), ("number", _NUMBER), ("json", _JSON)):
        if kind in kinds:
            return name
    return ""


def _light_decoder(kind: str) -> Decoder | None:
    if kind in _TEXT:
        return _text
    if kind in _NUMBER:
        return _number
    return _json if kind in _JSON else None


def _torch_decoder(kind: str) -> Decoder | None:
    if kind in _IMAGE:
        return lambda raw: _image_tensor(to_pil(raw))
    if kind == _RAW_IMAGE:
        return lambda raw: _image_tensor(raw_to_pil(raw))
    if kind == "npy":
        return lambda raw: to_tensor(np.load(io.BytesIO(raw), allow_pickle=False))
    return _light_decoder(kind) or to_tensor


def _text(raw: Any) -> str:
    return str(raw, "utf-8")


def _number(raw: Any) -> int:
    return int(bytes(raw))


def _json(raw: Any) -> Any:
    return json.loads(bytes(raw))


def to_pil(raw: Any) -> Any:
    """An encoded image as a loaded ``PIL.Image``, in the mode it is stored in."""
    image = _pillow().open(io.BytesIO(raw))
    image.load()
    return image


def raw_to_pil(raw: Any) -> Any:
    """The raw image of an MDS ``pil`` column: width, height, length of the mode, mode, pixels."""
    width, height, mode_size = (int(n) for n in raw[:12].view("<u4"))
    mode = bytes(raw[12 : 12 + mode_size]).decode("ascii")
    return _pillow().frombytes(mode, (width, height), bytes(raw[12 + mode_size :]))


def to_tensor(value: Any) -> Any:
    """A numpy array or scalar as a tensor over the same memory, copied only where torch cannot take it as it is."""
    import torch

    if not isinstance(value, np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    native = array.astype(array.dtype.newbyteorder("="), copy=not (array.flags.aligned and array.flags.writeable))
    return torch.from_numpy(native)


def _image_tensor(image: Any) -> torch.Tensor:
    import torch

    pixels = np.array(image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr") else image)
    tensor = torch.from_numpy(pixels)
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("decoding images needs pillow", hint="pip install pillow, or decode='bytes'") from None
    return Image
