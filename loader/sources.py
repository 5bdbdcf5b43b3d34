"""What a data set's source names: a folder, a pattern, a list of URLs or an index become a list of shards.

A name is taken as it stands first: ``br[1].tar`` is that object if there is one, else a pattern. In patterns ``{a,b}``
and ``{000..011}`` multiply out, ``*`` and ``?`` stay within one folder, ``**`` does not; where no object matches, the
folders that do are meant (stores that are folders: zarr, LMDB). A folder means all objects in it and below, without
folder markers, hidden files and what usually lies beside shards (:data:`SIDE_SUFFIXES`); one that another tool left
an index or a description in means what these say (:mod:`loader.layouts`).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from cachefs.errors import ConfigError, Denied, EmptyDataset, NotFound, UnknownFormat
from cachefs.objstore.url import parse_url

from .formats import Files, Format, WebDataset
from .layouts import LAYOUTS, Folder, Found
from .layouts.abc import side_by_side
from .layouts.mds_index import INDEX
from .layouts.wids import MOST as MOST_LISTING
from .layouts.wids import read_wids, wids_found
from .unfinished import refuse_unfinished

if TYPE_CHECKING:
    from cachefs.client import Client, ObjectStat

Source: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# fmt: off
SIDE_SUFFIXES = frozenset((
    ".idx", ".json", ".yaml", ".yml", ".toml", ".csv", ".tsv", ".txt", ".md", ".rst", ".html", ".py", ".ipynb", ".pkl",
    ".sqlite", ".db", ".log", ".lock", ".tmp", ".part", ".crc", ".md5", ".sha1", ".sha256", ".sha512", ".sig", ".uuid",
    ".ini", ".cfg",
))
# fmt: on
_LOCK = "lock.mdb"
_LENGTH = "__len__"
_TABLE = ".parquet"
_INDEX_SUFFIX = ".json"
_MAGIC = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_CHOICES = 10_000_000


def find_shards(source: Source, client: Client, format: Format | None) -> Found:
    """The shards that ``source`` names. Raises ``NotFound``, ``Denied``, ``EmptyDataset`` or ``FormatError``."""
    if isinstance(source, str | os.PathLike):
        return _merged([_find_one(os.fspath(source), client, format, patterns=True)], str(source))
    urls = [os.fspath(url) for url in source]
    return _merged(_each(urls, client, format, patterns=False), f"a list of {len(urls)} URLs")


def _each(urls: Sequence[str], client: Client, format: Format | None, *, patterns: bool) -> list[Found]:
    return side_by_side(lambda url: _find_one(url, client, format, patterns=patterns), urls)


def _merged(parts: Iterable[Found], name: str) -> Found:
    parts = [part for part in parts if part.stats]
    if not parts:
        raise EmptyDataset("no shard there", url=name, hint="markers, hidden files and side files do not count")
    stats = tuple(itertools.chain.from_iterable(part.stats for part in parts))
    kinds = {part.format for part in parts}
    if len(kinds - {None}) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds if kind is not None))
        raise ConfigError(f"shards of several kinds in one data set: {names}", url=name)
    return Found(
        stats,
        next(iter(kinds)) if len(kinds) == 1 else None,
        _joined([part.counts for part in parts]) if len(kinds) == 1 else None,
        _joined([part.raw_sizes for part in parts]) if len(kinds) == 1 else None,
    )


def _joined(parts: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [part for part in parts if part is not None]
    return tuple(itertools.chain.from_iterable(known)) if len(known) == len(parts) else None


def _find_one(url: str, client: Client, format: Format | None, *, patterns: bool) -> Found:
    denied: Denied | None = None
    if not url.endswith("/"):
        try:
            stat = client.stat(url)
        except NotFound:
            pass
        except Denied as e:
            denied = e  # without the right to list, a store answers so for a missing key as well
        else:
            if _basename(stat.url) == INDEX:
                return _by_index(stat, client, format)
            if stat.size or _is_local(url) or not _listed_if_allowed(url, client):
                return _by_listing(stat, client, format) or Found((stat,))
            # an empty object beside a folder of the same name is that folder's marker
    choices = list(expand_braces(url)) if patterns else [url]
    if choices != [url]:
        return _merged(_each(choices, client, format, patterns=True), url)
    if patterns and _MAGIC.search(url):
        return _by_pattern(url, client, format)
    try:
        listed = client.list(url)
    except Denied as e:
        hint = e.hint or "the right to list is needed for a folder; name the shards one by one otherwise"
        raise Denied(e.what, url=e.url or url, hint=hint) from (denied or e)
    if not listed:
        if denied is not None:
            raise denied
        if _is_local(url) and os.path.isdir(parse_url(url).key):
            raise NotFound("the folder is empty", url=parse_url(url).key)
        raise NotFound("neither an object nor a folder with objects in it", url=url)
    return _in_folder(url, listed, client, format)


def _by_index(stat: ObjectStat, client: Client, format: Format | None) -> Found:
    folder = stat.url.rpartition("/")[0]
    listed = _listed_if_allowed(folder, client)
    refuse_unfinished(listed, folder)
    # whatever else describes data, here or in folders below, is not what was named
    known = [stat, *(item for item in listed if not item.url.endswith(_INDEX_SUFFIX))]
    # without the right to list, the index alone is seen, and what it names is asked for one by one
    found = _by_layout(Folder(folder, tuple(known), client, format))
    if found is None:
        raise UnknownFormat("an index.json of no tool that is known", url=stat.url)
    return found


def _by_listing(stat: ObjectStat, client: Client, format: Format | None) -> Found | None:
    """What a JSON file lists, if it is a list of tars and not data itself."""
    if format not in (None, WebDataset()) or not stat.url.lower().endswith(".json") or stat.size > MOST_LISTING:
        return None
    shards = read_wids(client.read(stat.url), stat.url)
    return None if shards is None else wids_found(shards, {}, client)


def _in_folder(url: str, listed: Sequence[ObjectStat], client: Client, format: Format | None) -> Found:
    refuse_unfinished(listed, url)
    base = (parse_url(url).key if _is_local(url) else url).rstrip("/")
    found = _by_layout(Folder(base, tuple(listed), client, format))
    if found is not None:
        return found
    shards = [item for item in listed if not _hidden(item.url, url) and not _beside(item.url, format)]
    return Found(_without_tables(shards, format))


def _by_layout(folder: Folder) -> Found | None:
    return next((found for layout in LAYOUTS if (found := layout(folder)) is not None), None)


def _listed_if_allowed(folder: str, client: Client) -> list[ObjectStat]:
    try:
        return client.list(folder)
    except Denied:
        return []  # all that a listing would save can be asked for one by one


def _by_pattern(pattern: str, client: Client, format: Format | None) -> Found:
    if _is_local(pattern):
        pattern = parse_url(pattern).key
    magic = _MAGIC.search(pattern)
    assert magic is not None  # the caller saw it
    folder = pattern[: pattern.rfind("/", 0, magic.start()) + 1]
    try:
        matches = re.compile(pattern_regex(pattern)).fullmatch
    except re.error as e:
        raise ConfigError(f"the pattern cannot be read: {e}", url=pattern) from e
    flat = "**" not in pattern and "/" not in pattern[magic.start() :]
    try:
        found = client.list(folder, delimiter=flat)
    except NotFound:
        found = []
    listed = [item for item in found if not item.is_prefix]
    refuse_unfinished(listed, pattern)
    suffix = os.path.splitext(pattern)[1]
    stats = tuple(
        item
        for item in listed
        if matches(item.url)
        and (not _hidden(item.url, folder) or _basename(pattern).startswith("."))
        and (not _beside(item.url, format) or suffix in SIDE_SUFFIXES)
    )
    if not stats:
        folders = _matching_folders(found, folder, matches)
        if not folders:
            raise NotFound("no object and no folder matches the pattern", url=pattern)
        return _merged(_each(folders, client, format, patterns=False), pattern)
    return Found(stats if suffix == _TABLE else _without_tables(stats, format))


def _matching_folders(listed: Iterable[ObjectStat], top: str, matches: Callable[[str], object]) -> list[str]:
    """The outermost folders below ``top`` that match, in order of their names: stores that are folders (zarr, LMDB)."""
    found = set()
    for item in listed:
        at = len(top) - 1
        while (at := item.url.find("/", at + 1)) >= 0:
            url = item.url[:at]
            if matches(url):
                if not _hidden(url, top):
                    found.add(url)
                break
    return sorted(found)


def _without_tables(shards: Sequence[ObjectStat], format: Format | None) -> tuple[ObjectStat, ...]:
    """Without the Parquet files of img2dataset, which describe the tars of the same names; or without these tars,
    where Parquet is asked for. Plain files are all there."""
    if format is not None and format.name == Files.name:
        return tuple(shards)
    names = {item.url for item in shards}
    ends = (_TABLE, ".tar") if format is None or format.name == WebDataset.name else (".tar", _TABLE)
    drop, keep = ends
    return tuple(
        item for item in shards if not (item.url.endswith(drop) and item.url.removesuffix(drop) + keep in names)
    )


def expand_braces(text: str) -> Iterator[str]:
    """All texts that ``{a,b}``, ``{000..011}`` and ``{a..f}`` stand for, the first group varying slowest."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    for choice in _choices(match.group(1)):
        for rest in expand_braces(text[match.end() :]):
            yield text[: match.start()] + choice + rest


def _choices(inner: str) -> Sequence[str]:
    numbers = _RANGE.fullmatch(inner)
    if numbers is not None:
        first, last = (int(n) for n in numbers.groups())
        if abs(last - first) >= _MOST_CHOICES:
            raise ConfigError(f"{{{inner}}} stands for more than {_MOST_CHOICES} shards")
        width = len(numbers.group(1)) if numbers.group(1).startswith("0") else 0
        step = 1 if first <= last else -1
        return [f"{n:0{width}d}" for n in range(first, last + step, step)]
    if re.fullmatch(r"[a-zA-Z]\.\.[a-zA-Z]", inner):
        first, last = ord(inner[0]), ord(inner[-1])
        return [chr(n) for n in range(first, last + 1)]
    return inner.split(",") if "," in inner else [f"{{{inner}}}"]


def pattern_regex(pattern: str) -> str:
    """The regular expression of a glob pattern: ``*`` and ``?`` never match ``/``, ``**`` matches anything."""
    out = []
    at = 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            out.append(".*")
            at += 2
            continue
        char = pattern[at]
        close = pattern.find("]", at + 2) if char == "[" else -1
        if close > 0:
            body = pattern[at + 1 : close].replace("\\", "\\\\")
            out.append(f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]")
            at = close + 1
            continue
        out.append({"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char))
        at += 1
    return "(?s:" + "".join(out) + ")"


def _is_local(url: str) -> bool:
    return parse_url(url).is_local


def _basename(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _hidden(url: str, folder: str) -> bool:
    """Whether a part of the path below ``folder`` starts with a dot, or the name is a marker of Hadoop's tools."""
    base = (parse_url(folder).key if _is_local(folder) else folder).rstrip("/") + "/"
    below = url[len(base) :] if url.startswith(base) else _basename(url)
    name = _basename(url)
    return any(part.startswith(".") for part in below.split("/")) or name == "_SUCCESS" or name.endswith("_$folder$")


def _beside(url: str, format: Format | None) -> bool:
    name = _basename(url).lower()
    if format is not None and format.takes(name):
        return False
    return os.path.splitext(name)[1] in SIDE_SUFFIXES or name in (_LOCK, _LENGTH)
