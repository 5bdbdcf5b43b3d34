"""Certificates of a private authority."""

from __future__ import annotations

from ..errors import ConfigError


def read_bundle(path: str) -> str:
    """The text of a PEM file. Raises :class:`ConfigError` when it cannot be read or holds no certificate."""
    hint = "NEARFLASH_CA_BUNDLE or AWS_CA_BUNDLE names a PEM file"
    try:
        with open(path, encoding="ascii") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        what = e.strerror if isinstance(e, OSError) else "not text"
        raise ConfigError(f"the CA bundle cannot be read: {what}", url=path, hint=hint) from e
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError("the CA bundle holds no certificate", url=path, hint=hint)
    return text
