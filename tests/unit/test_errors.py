"""The error tree: one line each, picklable, and under the builtin that callers expect."""

from __future__ import annotations

import pickle

import pytest

from cachefs import errors
from cachefs.errors import NearflashError


def all_errors() -> list[type[NearflashError]]:
    found: list[type[NearflashError]] = []
    todo = [NearflashError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return found


@pytest.mark.parametrize("cls", all_errors(), ids=lambda c: c.__name__)
def test_every_error_is_one_line_and_survives_pickling(cls: type[NearflashError]) -> None:
    e = cls("it\nbroke", url="s3://b/k", offset=7, hint="mend it")
    assert str(e) == "s3://b/k at byte 7: it broke (mend it)"
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is cls
    assert (again.what, again.url, again.offset, again.hint, str(again)) == (e.what, e.url, 7, "mend it", str(e))
    assert str(cls("from one string")) == "from one string"


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.NotFound, FileNotFoundError),
        (errors.Denied, PermissionError),
        (errors.Unavailable, ConnectionError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.MissingField, KeyError),
        (errors.ConfigError, ValueError),
    ],
)
def test_code_that_knows_only_builtins_can_handle_them(cls: type[NearflashError], builtin: type[BaseException]) -> None:
    with pytest.raises(builtin):
        raise cls("x")


def test_signatures_and_passwords_are_in_no_message() -> None:
    url = "https://me:hush@host/k?X-Amz-Signature=hush"
    error = errors.NotFound(f"asked {url} in vain", url=url, hint=f"see {url}")
    assert "hush" not in str(error) + repr(error)
    assert str(error) == "https://host/k: asked https://host/k in vain (see https://host/k)"
    said = 'no answer from "https://sts.host/?Action=hush&Token=hush", tried <http://me:hush@h/p?q> twice'
    assert str(errors.Unavailable(said)) == 'no answer from "https://sts.host/", tried <http://h/p> twice'
    assert "hush" not in str(errors.NotFound('asked https://h/a"b?x="c&Signature=hush twice'))
    assert str(errors.NotFound("x", url="s3://b/a@b?c=1")) == "s3://b/a@b?c=1: x", "a key is no URL's query"


@pytest.mark.parametrize("cls", [errors.FormatError, errors.MissingField, errors.NotFound])
def test_what_a_worker_raised_keeps_the_lines_of_its_traceback(cls: type[NearflashError]) -> None:
    from torch._utils import ExceptionWrapper

    try:
        raise cls("it broke", url="s3://b/k", hint="mend it")
    except NearflashError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(cls) as raised:
        wrapped.reraise()
    lines = str(raised.value).splitlines()
    assert lines[0] == f"Caught {cls.__name__} in DataLoader worker process 0."
    assert lines[1] == "Original Traceback (most recent call last):" and lines[2].startswith("  File ")
    assert lines[-1].endswith(f"{cls.__name__}: s3://b/k: it broke (mend it)")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
