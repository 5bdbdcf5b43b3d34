"""Hypothesis strategies for what object stores hold."""

from __future__ import annotations

from hypothesis import strategies as st

from ..objstore.route import is_plain

_LIMIT = 1024

# The ones that clients get wrong: encodings of each other, path syntax, query syntax, glob syntax, case, forms of é.
SPECIAL_NAMES = (
    "a b",
    "a+b",
    "a%20b",
    "a%2520b",
    "100%",
    "%41",
    "A",
    "a",
    "br[1]",
    "what?",
    "h#1",
    "*",
    "{a,b}",
    "a&b=c",
    "a:b",
    'q"uote',
    "it's",
    "back\\slash",
    "~tilde",
    "\u00e9t\u00e9",  # composed (NFC)
    "e\u0301te\u0301",  # decomposed (NFD)
    "\U0001f600",
)
"""Single segments, all different, all plain."""

ODD_KEYS = (
    "a//b",
    "/lead",
    "trail/",
    "d/../../esc.bin",
    "../x",
    "a/./b",
    "..",
    "x/..",
    "//",
    "tab\there",
)
"""Keys that are no paths, but that S3 keeps as they are."""


def segments() -> st.SearchStrategy[str]:
    """One part of a key between two slashes: any characters, often the troublesome ones; never empty."""
    characters = st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="/")
    return st.one_of(st.sampled_from(SPECIAL_NAMES), st.text(characters, min_size=1, max_size=20))


def keys() -> st.SearchStrategy[str]:
    """Any key that S3 allows: up to 1,024 bytes of UTF-8, dots and slashes anywhere."""
    part = st.one_of(segments(), st.sampled_from(("", ".", "..", "...")))
    return st.lists(part, min_size=1, max_size=6).map("/".join).filter(_allowed)


def plain_keys() -> st.SearchStrategy[str]:
    """Keys that every backend holds."""
    return keys().filter(is_plain)


def _allowed(key: str) -> bool:
    return 0 < len(key.encode()) <= _LIMIT
