"""Names of dtypes, as users give them for the tokens in files and in samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from cachefs.errors import ConfigError


def integer_name(of: str, option: str, given: Any) -> str:
    """numpy's own name of an integer dtype, however it is spelled: ``"uint16"`` for ``"<u2"`` or ``numpy.uint16``.

    Raises ``ConfigError``, which names the ``option`` of ``of``, for all others, and for one of swapped bytes: what is
    read is little-endian, and what is made is as this machine has it.
    """
    try:
        dtype = None if given is None else np.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "iu":
        raise ConfigError(f"{of}({option}={given!r}) is no integer dtype", hint='for example "uint16"')
    if not dtype.isnative:
        hint = f"write {dtype.name!r}; data of swapped bytes has to be written anew"
        raise ConfigError(f"{of}({option}={given!r}): tokens are little-endian here", hint=hint)
    return str(dtype.name)
