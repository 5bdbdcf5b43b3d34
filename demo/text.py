"""Real text: the sources of Python's own standard library and the documentation strings in them, cut into windows."""

from __future__ import annotations

import ast
import bisect
import itertools
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo", "lib2to3"}
)
"""Folders that not every installation has, or that are not the standard library."""


@dataclass(frozen=True)
class Document:
    """A piece of text and where it is from, such as ``json/decoder.py`` or ``json/decoder.py docstrings``."""

    name: str
    text: bytes


def stdlib_documents(root: Path | None = None) -> list[Document]:
    """Every module of the standard library twice: its source, and its documentation strings alone. Sorted by name."""
    top = root or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(top.rglob("*.py")):
        relative = path.relative_to(top)
        if LEFT_OUT.intersection(relative.parts):
            continue
        source = path.read_bytes()
        name = relative.as_posix()
        documents.append(Document(name, source))
        strings = "\n\n".join(docstrings(source))
        if strings:
            documents.append(Document(f"{name} docstrings", strings.encode()))
    return documents


def docstrings(source: bytes) -> Iterator[str]:
    """The documentation strings of a module, its classes and functions, each under the name it documents."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):  # the library carries a few files that are broken on purpose
        return
    inside: deque[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = deque([module])
    while inside:
        node = inside.popleft()
        text = ast.get_docstring(node)
        if text:
            yield f"{getattr(node, 'name', 'module')}\n{text}"
        inside += (n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def windows(documents: Sequence[Document], count: int, length: int) -> list[Document]:
    """``count`` windows of exactly ``length`` bytes, evenly spread over all the text, each valid UTF-8.

    A window that would begin or end inside a character gives that character up and is filled with newlines; where
    there is less text than ``count * length`` bytes the windows overlap. Raises ``ValueError`` for too little text.
    """
    text = b"".join(d.text for d in documents)
    if len(text) < length or count < 1:
        raise ValueError(f"{len(text)} bytes of text do not hold {count} windows of {length}")
    starts = list(itertools.accumulate((len(d.text) for d in documents), initial=0))
    step = (len(text) - length) / max(1, count - 1)
    cut = []
    for i in range(count):
        at = int(i * step)
        document = bisect.bisect_right(starts, at) - 1
        name = f"{documents[document].name}@{at - starts[document]}"
        whole = text[at : at + length].decode("utf-8", "ignore").encode()
        cut.append(Document(name, whole.ljust(length, b"\n")))
    return cut
