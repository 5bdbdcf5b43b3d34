"""Options that hold names have one rule, whichever format they belong to; options that shape no sample are no part of
what a data set is told by."""

from __future__ import annotations

from typing import Any

import pytest

from cachefs.errors import ConfigError
from loader.formats import Format, LitData, Lmdb, Npz, TFRecord, Zarr

OPTIONS = [(Lmdb, "skip"), (Lmdb, "text"), (LitData, "names"), (Npz, "arrays"), (Zarr, "arrays")]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
class TestNames:
    def test_a_list_is_a_tuple(self, kind: type[Format], option: str) -> None:
        format = kind(**{option: ["a", "b"]})
        assert getattr(format, option) == ("a", "b") and format == kind(**{option: ("a", "b")})
        assert hash(format) and kind.from_options(format.options()) == format

    @pytest.mark.parametrize("value", ["ab", ("a", "a"), ["a", 1], {"a": 1}, 3])
    def test_all_else_is_refused(self, kind: type[Format], option: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\({option}="):
            kind(**{option: value})


@pytest.mark.parametrize(("kind", "option"), OPTIONS[2:])
def test_no_names_are_no_choice(kind: type[Format], option: str) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        kind(**{option: ()})
    assert getattr(kind(**{option: None}), option) is None


def test_whether_sums_are_checked_changes_no_sample() -> None:
    assert TFRecord(verify=False).identity() == TFRecord().identity() == repr(TFRecord())
    assert TFRecord(example=True).identity() != TFRecord().identity()
