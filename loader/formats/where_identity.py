"""What tells a filter from others: in a data set's digest, and in the name of what is kept beside a shard."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType as _Built
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from cachefs.errors import ConfigError
from cachefs.hashing import name_digest

from .where_expression import Expression, parts_of

_PLAIN = (
    str, bytes, int, float, complex, bool, type(None), type(...), range, datetime.date, datetime.datetime,
    datetime.time, datetime.timedelta, decimal.Decimal,
)  # fmt: skip
"""Types whose ``repr`` tells all of a value, and tomorrow as well."""
_Cached = type(lru_cache(len))


def expression_identity(expression: Expression, fields: Sequence[str] | None, name: str | None) -> str:
    """The expression's text, for people, after a digest of all that the filter consists of."""
    digest = name_digest(json.dumps([parts_of(expression).digest, _sorted(fields), name]))
    return f"expression {digest} {' '.join(str(expression).split())}{_of(fields)}{_named(name)}"


def function_identity(function: Callable[..., Any], fields: Sequence[str], name: str | None) -> str:
    """The function's module and name, or the ``name`` that stands for both. Raises ``ConfigError`` where it needs
    such a name and has none."""
    if name is not None:
        return f"function{_of(fields)}{_named(name)}"
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    plain = (
        isinstance(qualified, str) and "<lambda>" not in qualified and getattr(function, "__closure__", None) is None
    )
    if not (plain and hasattr(function, "__code__") and not hasattr(function, "__self__")):
        raise ConfigError(
            f"the filter {called(function)} has no name that tells what it does",
            hint="give one that changes with it: loader.Where(function, fields=[...], name='caption-length-1')",
        )
    where = "" if module in (None, "__main__", "__mp_main__") else f"{module}."
    return f"function {where}{qualified}{_of(fields)}"


def called(function: Any) -> str:
    """What a function is called in messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _sorted(fields: Sequence[str] | None) -> list[str] | None:
    return None if fields is None else sorted(fields)


def _of(fields: Sequence[str] | None) -> str:
    return "" if fields is None else f" of {json.dumps(_sorted(fields))}"


def _named(name: str | None) -> str:
    return "" if name is None else f" named {name}"


def code_of(function: Callable[..., Any]) -> str:
    """What tells a function from what it was before somebody edited it: a digest of its code and of the values that it
    is bound to (defaults, closures, globals that it names, arguments of ``partial``), with the functions of its own
    module that it calls. Of other modules' functions the names are told, of other objects the type alone. It differs
    between versions of Python, so it is no part of a data set's digest."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    return name_digest(repr(_Telling(getattr(inner, "__module__", None)).value(function)))


class _Telling:
    """Values, as nests of lists whose ``repr`` tells them."""

    def __init__(self, module: str | None) -> None:
        self._module = module
        self._functions: set[int] = set()  # told already, each is told once
        self._containers: set[int] = set()  # those that the value at hand lies in

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, MethodType):
            return ["method", self.value(value.__func__), self._state(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, _Cached):
            return ["cached", self.value(value.__wrapped__)]
        if isinstance(value, partial):
            return ["partial", *map(self.value, (value.func, value.args, value.keywords))]
        if isinstance(value, Mapping | Set | list | tuple):
            return self._container(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return ["array", value.dtype.descr, value.shape, name_digest(value.tobytes())]
        if isinstance(value, enum.Enum):
            return ["member", kind.__qualname__, value.name, self.value(value.value)]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__]
        if kind.__module__ == self._module and callable(value):
            return [self.value(kind.__call__), self._state(value)]
        return ["some", kind.__module__, kind.__qualname__, called(value) if isinstance(value, _Built) else ""]

    def _state(self, value: Any) -> Any:
        """What an object is made of, if it is of the predicate's module."""
        kind = type(value)
        own = kind.__module__ == self._module and hasattr(value, "__dict__")
        return ["object", kind.__module__, kind.__qualname__, self._container(vars(value)) if own else None]

    def _container(self, value: Any) -> Any:
        if id(value) in self._containers:
            return "around it"
        self._containers.add(id(value))
        try:
            name = type(value).__qualname__
            if isinstance(value, Mapping):
                return [name, sorted(repr([self.value(key), self.value(part)]) for key, part in value.items())]
            parts: Iterable[Any] = map(self.value, value)
            return [name, sorted(map(repr, parts)) if isinstance(value, Set) else list(parts)]
        finally:
            self._containers.discard(id(value))

    def _function(self, function: Any) -> Any:
        name = f"{getattr(function, '__module__', '')}.{called(function)}"
        if getattr(function, "__module__", None) != self._module:
            return ["function", name]
        if id(function) in self._functions:
            return ["function", called(function)]
        self._functions.add(id(function))
        known = getattr(function, "__globals__", {})
        return [
            "function",
            self._code(function.__code__),
            [self.value(_content(cell)) for cell in getattr(function, "__closure__", None) or ()],
            self.value(getattr(function, "__defaults__", None)),
            self.value(getattr(function, "__kwdefaults__", None)),
            [[name, self.value(known[name])] for name in sorted(_globals(function.__code__)) if name in known],
        ]

    def _code(self, code: CodeType) -> Any:
        return ["code", code.co_code, code.co_names, [self.value(part) for part in code.co_consts]]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # it is bound later


def _globals(code: CodeType) -> set[str]:
    """The names that a code and those in it look up, some of them of attributes."""
    return set(code.co_names).union(*map(_globals, _codes(code)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    return (part for part in code.co_consts if isinstance(part, CodeType))
