"""From the bytes of one field to its value: text, numbers, JSON, arrays, images, tensors.

Each function takes what a sample holds undecoded (mostly a ``uint8`` view) and raises whatever damaged bytes make it
raise; :mod:`loader.decode` says which one is for what, and names the sample in the error.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError

from .formats.npy_header import MOST, NpyHeader, read_header

if TYPE_CHECKING:
    import torch

_MAX_KEPT_HEADERS = 512


def to_text(raw: Any) -> str:
    return str(raw, "utf-8")


def to_int(raw: Any) -> int:
    return int(bytes(raw))


def to_json(raw: Any) -> Any:
    return json.loads(bytes(raw))


def to_array(raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The array of a ``.npy`` file as a view of its bytes. Nothing is ever unpickled."""
    head = raw[:10].tobytes()
    length = int.from_bytes(head[8:10], "little") + (10 if head[6:7] == b"\x01" else 12)
    header = _npy_header(raw[: min(length, MOST)].tobytes(), len(raw))
    if header.dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled")
    return header.array(raw)


@lru_cache(_MAX_KEPT_HEADERS)
def _npy_header(head: bytes, size: int) -> NpyHeader:
    # a data set's arrays have few shapes, and parsing a header costs more than all else
    return read_header(np.frombuffer(head, np.uint8), size, "")


def to_pil(raw: Any) -> Any:
    """An encoded image as a loaded ``PIL.Image``, in the mode it is stored in. A struct of ``bytes`` and ``path``
    (Hugging Face ``Image``) stands for its bytes."""
    if isinstance(raw, Mapping):
        if raw.get("bytes") is None:
            raise ValueError(f"the image is not in the data, only its path {raw.get('path')!r}")
        raw = raw["bytes"]
    image = _pillow().open(io.BytesIO(raw))
    image.load()
    return image


def raw_to_pil(raw: Any) -> Any:
    """The raw image of an MDS ``pil`` column: width, height, length of the mode, mode, pixels."""
    width, height, mode_size = (int(n) for n in raw[:12].view("<u4"))
    mode = bytes(raw[12 : 12 + mode_size]).decode("ascii")
    return _pillow().frombytes(mode, (width, height), bytes(raw[12 + mode_size :]))


def to_tensor(value: Any) -> Any:
    """A numpy array or scalar as a tensor over the same memory, copied only where torch cannot take it as it is.

    What no tensor holds (times, text) stays as it is.
    """
    import torch

    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biufc":
        return value
    array = np.asarray(value)
    native = array.astype(array.dtype.newbyteorder("="), copy=not (array.flags.aligned and array.flags.writeable))
    return torch.from_numpy(native)


def array_to_tensor(raw: npt.NDArray[np.uint8]) -> Any:
    """The array of a ``.npy`` file as a tensor."""
    return to_tensor(to_array(raw))


def image_to_tensor(raw: Any) -> torch.Tensor:
    """An encoded image as ``uint8`` of shape (channels, height, width)."""
    return _pixels(to_pil(raw))


def raw_image_to_tensor(raw: Any) -> torch.Tensor:
    """As :func:`image_to_tensor`, of the raw image of an MDS ``pil`` column."""
    return _pixels(raw_to_pil(raw))


def load_tensors(raw: Any) -> Any:
    """What ``torch.save`` wrote, on the CPU, as long as it is tensors and plain containers; nothing else is run."""
    import torch

    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def _pixels(image: Any) -> torch.Tensor:
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
