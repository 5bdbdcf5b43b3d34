"""``head``: the first samples of a data set, as a person or a program can read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cachefs.commandline import json_option, plain

from .options import decode_choice, decode_option, fields_option, open_data, source_options, split_fields

if TYPE_CHECKING:
    from ..sample import Sample
    from .dataset import DataSet, Reader


@click.command()
@click.argument("url")
@click.option("-n", "number", type=click.IntRange(min=0), default=5, show_default=True, help="How many samples.")
@fields_option
@decode_option("default")
@click.option("--base64", "whole", is_flag=True, help="With --json: bytes and arrays whole instead of a digest.")
@source_options
@json_option
def head(url: str, number: int, fields: str | None, decode: str, whole: bool, as_json: bool, **options: Any) -> None:
    """Print the first samples. With --json one JSON object a line."""
    from .dataset import Reader
    from .values import line, to_json

    if whole and not as_json:
        raise click.UsageError("--base64 needs --json")
    names = split_fields(fields)
    with open_data(url, options) as data:
        reader = Reader.of(data.format, decode_choice(decode), names)
        for place, where, sample in first_samples(data, reader, number):
            if as_json:
                click.echo(json.dumps({name: to_json(value, whole=whole) for name, value in sample.items()}))
                continue
            click.echo(plain(f"sample {place}  ({where})"))
            width = max(map(len, sample), default=0)
            for name, value in sample.items():
                click.echo(plain(f"  {name:<{width}}  {line(value)}"))


def first_samples(data: DataSet, reader: Reader, number: int) -> Iterator[tuple[int, str, Sample]]:
    """The first ``number`` samples with their numbers in the data set and where they lie."""
    place = 0
    for shard_number in range(len(data.stats)):
        if place >= number:
            return
        for shard in data.opened(shard_number):
            for i in range(min(len(shard.index), number - place)):
                yield place, f"sample {i} of {shard.url}", reader(shard, i)
                place += 1
