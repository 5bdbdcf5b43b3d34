"""``convert``: a data set of any format, written as MDS, WebDataset tar, Parquet or token files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cachefs.commandline import json_option, plain

from .options import connect_with, decode_choice, fields_option, open_data, source_options, split_fields

if TYPE_CHECKING:
    from ..writers import Placed
    from .dataset import DataSet, Reader


@click.command()
@click.argument("source")
@click.argument("out")
@click.option("--to", "kind", required=True, type=click.Choice(["mds", "wds", "parquet", "tokens"]), help="The format.")
@fields_option
@click.option("--shard-size", default="64MB", show_default=True, help="Bytes of a shard before compression.")
@click.option("--compression", help="zstd for MDS; gzip for tar; zstd, snappy ... for Parquet; zstd:9 with a level.")
@click.option("--column", "columns", multiple=True, metavar="FIELD=TYPE", help="What a field is written as.")
@click.option(
    "--keys",
    type=click.Choice(["keep", "number"]),
    default="keep",
    show_default=True,
    help="Names of a tar's samples: their __key__, or their number.",
)
@click.option(
    "--decode",
    type=click.Choice(["default", "bytes"]),
    help="Text, numbers and JSON of a tar become values, or stay bytes (the default for --to wds).",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="Damaged samples end the conversion, or are left out and counted.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first samples.")
@click.option("--force", is_flag=True, help="Replace what an earlier conversion to the same format wrote.")
@source_options
@json_option
def convert(
    source: str,
    out: str,
    kind: str,
    fields: str | None,
    shard_size: str,
    compression: str | None,
    columns: tuple[str, ...],
    keys: Any,
    decode: str | None,
    on_error: str,
    limit: int | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the samples of SOURCE, in their order, into OUT: an empty folder or prefix.

    What each value becomes is documented with the format; one that the format cannot hold is an error that names
    sample and field. OUT gets its files when they are complete.
    """
    from cachefs.progress import byte_bar, human_bytes
    from cachefs.values import parse_size

    from ..writers import WRITERS, WriteOptions, open_output
    from .dataset import Reader

    writer = WRITERS[kind]
    wanted = WriteOptions(parse_size(shard_size), compression, _columns(columns), keys)
    names = split_fields(fields)
    choice = decode_choice(decode or ("bytes" if writer.raw else "default"))
    with open_data(source, options) as data:
        _refuse_overlap(data, out)
        reader = Reader.of(data.format, choice, names)
        _, origin = connect_with(options)
        lost: list[str] = []
        with (
            open_output(out, own=writer.shards, force=force, origin=origin) as output,
            byte_bar("converting", data.nbytes, show=not as_json) as advance,
        ):
            samples = all_samples(data, reader, advance, lost if on_error == "skip" else None)
            if names is not None and "__key__" not in names and not writer.keyed:
                samples = map(_without_key, samples)
            written = writer(output, wanted).write(itertools.islice(samples, limit))
            output.commit()
    shown: dict[str, Any] = {"out": out, "format": kind, **asdict(written), "lost": len(lost)}
    if as_json:
        click.echo(json.dumps(shown))
        return
    click.echo(plain(f"{written.samples} samples in {written.shards} shards, {human_bytes(written.bytes)}, in {out}"))
    for name, column in written.columns.items():
        click.echo(plain(f"  {name}: {column}"))
    for note in written.notes:
        click.echo(plain(note))
    if lost:
        click.echo(plain(f"{len(lost)} damages left out, the first: {lost[0]}"))


def _columns(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    wrong = next((text for text, pair in zip(texts, pairs, strict=True) if not (pair[0] and pair[2])), None)
    if wrong is not None:
        raise click.UsageError(f"--column {wrong!r} is not FIELD=TYPE")
    return {name: kind for name, _, kind in pairs}


def _refuse_overlap(data: DataSet, out: str) -> None:
    """No output over its own source: replacing it would take away what is still to be read."""
    from cachefs.errors import ConfigError
    from cachefs.objstore.url import parse_url

    target = parse_url(out)
    folder = os.path.realpath(target.key) if target.is_local else str(target).rstrip("/")
    for stat in data.stats:
        url = parse_url(stat.url)
        if url.is_local:
            # a link to the shard, or to its folder, is the shard
            folders = {os.path.dirname(os.path.realpath(url.key)), os.path.realpath(os.path.dirname(url.key))}
        else:
            folders = {str(url).rpartition("/")[0]}
        if folder in folders:
            raise ConfigError("the output is the folder of the source", url=out)


def all_samples(
    data: DataSet, reader: Reader, advance: Callable[[int], None], lost: list[str] | None
) -> Iterator[Placed]:
    """Every sample in order, numbered. With ``lost`` damaged samples and shards are passed over and noted there."""
    from cachefs.errors import DataError, MissingField

    from ..writers import Placed

    number = 0
    for shard_number, stat in enumerate(data.stats):
        data.prefetch(shard_number)
        try:
            for shard in data.opened(shard_number):
                for i in range(len(shard.index)):
                    try:
                        sample = reader(shard, i)
                    except MissingField:
                        raise
                    except DataError as e:
                        if lost is None:
                            raise
                        lost.append(str(e))
                        continue
                    yield Placed(sample, number, shard.url)
                    number += 1
        except MissingField:
            raise
        except DataError as e:
            if lost is None:
                raise
            lost.append(str(e))
        advance(stat.size)


def _without_key(placed: Placed) -> Placed:
    return placed._replace(sample={name: value for name, value in placed.sample.items() if name != "__key__"})
