"""Options of formats that have the same rule everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachefs.errors import ConfigError

if TYPE_CHECKING:
    from .abc import Format


def settle_names(format: Format, option: str, *, optional: bool = True, empty: bool = False) -> None:
    """Make an option that holds names a tuple, so that the format can be hashed.

    A list or a tuple of different names is taken; ``optional``: ``None`` too, ``empty``: no names too. Raises
    ``ConfigError`` for all else.
    """
    value = getattr(format, option)
    if value is None and optional:
        return
    given = f"{type(format).__name__}({option}={value!r})"
    if not isinstance(value, list | tuple) or not all(type(name) is str for name in value):
        raise ConfigError(f"{given} is no tuple of names", hint=f'for example {option}=("inputs", "targets")')
    if len(set(value)) != len(value):
        raise ConfigError(f"{given} names something twice")
    if not value and not empty:
        raise ConfigError(f"{given} names nothing")
    object.__setattr__(format, option, tuple(value))
