"""Options that the commands share: which data set, in which format, through which cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cachefs.commandline import given_origin, origin_options
from cachefs.errors import ConfigError

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.config import Origin

    from ..decode import DecodeOption
    from ..formats import Format
    from .dataset import DataSet

F = TypeVar("F", bound=Callable[..., Any])

_TOKENS = ("length", "stride", "dtype", "labels")
# fmt: off
FORMATS = (
    "webdataset", "parquet", "arrow", "tfrecord", "lmdb", "npy", "npz", "llmc", "megatron", "mds", "litdata", "jsonl",
    "zarr", "wds", "tar", "files", "tokenfile", "tokens",
)
# fmt: on
"""The names that ``--format`` takes: written out, so that ``--help`` loads none of them."""


def source_options(command: F) -> F:
    """What :func:`open_data` takes: the format's options, the cache directory, the origin."""
    command = origin_options(command)
    for option in (
        click.option("--cache-dir", help="Cache directory [env NEARFLASH_CACHE_DIR]."),
        click.option("--labels", is_flag=True, default=None, help="Tokens: with labels."),
        click.option("--dtype", help="Tokens: type of the ids (default uint16)."),
        click.option("--stride", type=click.IntRange(min=1), help="Tokens: from one sample to the next."),
        click.option("--length", type=click.IntRange(min=1), help="Tokens: ids in a sample."),
        click.option("-O", "--option", "extra", multiple=True, metavar="NAME=VALUE", help="Another of its options."),
        click.option("--format", "named", help=f"The format, where the bytes do not tell: {', '.join(FORMATS)}."),
    ):
        command = option(command)
    return command


def fields_option(command: F) -> F:
    """``fields``: see :func:`split_fields`."""
    return click.option("--fields", help="Only these fields: a,b.")(command)


def decode_option(default: str) -> Callable[[F], F]:
    """``decode``: see :func:`decode_choice`."""
    return click.option(
        "--decode",
        type=click.Choice(["default", "bytes", "pil"]),
        default=default,
        show_default=True,
        help="What fields are decoded to: text, numbers and JSON; nothing; images as well.",
    )


def decode_choice(name: str) -> DecodeOption:
    """``decode=`` of a data set, as :func:`decode_option` names it."""
    choices: dict[str, DecodeOption] = {"default": None, "bytes": "bytes", "pil": "pil"}
    return choices[name]


def split_fields(text: str | None) -> tuple[str, ...] | None:
    """``a,b`` as names; ``None``: all fields."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise click.UsageError(f"--fields {text!r} has an empty name in it")
    return names


def open_data(url: str, options: dict[str, Any]) -> DataSet:
    """The data set that a command line names; to be closed. ``options``: those of :func:`source_options`."""
    from cachefs.errors import UnknownFormat

    from .dataset import DataSet

    chosen = chosen_format(options)
    client, _ = connect_with(options)
    try:
        return DataSet.find(url, chosen, client)
    except UnknownFormat as e:
        client.close()
        raise UnknownFormat(e.what, url=e.url, offset=e.offset, hint=in_options(e.hint)) from e
    except BaseException:
        client.close()
        raise


def in_options(hint: str | None) -> str | None:
    """A hint that is written in Python, in the words of a command line."""
    from ..formats.unknown import FILES_HINT, TOKENS_HINT

    words = {
        TOKENS_HINT: "headerless token files need --format tokens --length 2048 --dtype uint16",
        FILES_HINT: "--format files makes every file a sample",
    }
    for python, option in words.items():
        hint = hint and hint.replace(python, option)
    return hint


def connect_with(options: dict[str, Any]) -> tuple[Client, Origin]:
    """A client for the cache and the origin that the options name. Contacts nobody yet."""
    import logging

    from cachefs.client import connect
    from cachefs.config import Settings

    logging.getLogger("cachefs").addHandler(logging.NullHandler())  # warnings become the command's own output
    logging.getLogger("cachefs").propagate = False
    names = ("endpoint", "region", "preset", "anonymous")
    origin = given_origin({name: options[name] for name in names})
    return connect(Settings.load(cache_dir=options["cache_dir"], origin=origin)), origin


def chosen_format(options: dict[str, Any]) -> Format | None:
    """The format that the options name; ``None`` where the bytes shall decide."""
    from ..formats.registry import BY_NAME, KINDS

    name: str | None = options["named"]
    given = {option: options[option] for option in _TOKENS if options[option] is not None}
    given |= dict(map(_parsed, options["extra"]))
    if name is None:
        if given:
            raise click.UsageError(f"--{next(iter(given))} is an option of a format: give --format as well")
        return None
    kind = BY_NAME.get(name) or KINDS.get(name)
    if kind is None:
        raise click.UsageError(f"--format {name!r} is not known; known: {', '.join(FORMATS)}")
    if not given and name == "tokens":
        raise click.UsageError("--format tokens needs --length, and --dtype unless it is uint16")
    known = kind.__dataclass_fields__
    unknown = [option for option in given if option not in known]
    if unknown:
        raise click.UsageError(f"the format {kind.name!r} has no option {unknown[0]!r}; known: {', '.join(known)}")
    try:
        return kind.from_options(given)
    except ConfigError as e:
        raise click.UsageError(str(e)) from e


def _parsed(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--option {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
