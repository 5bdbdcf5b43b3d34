"""``check``: reads every byte of every sample, and lists what is damaged."""

from __future__ import annotations

import json
from typing import Any

import click

from cachefs.commandline import json_option, plain

from .options import decode_choice, decode_option, fields_option, open_data, source_options, split_fields


@click.command()
@click.argument("url")
@fields_option
@decode_option("default")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads (default: one a core, at most 16).")
@click.option("--most", type=click.IntRange(min=0), default=100, show_default=True, help="Damages to list.")
@source_options
@json_option
def check(
    url: str, fields: str | None, decode: str, workers: int | None, most: int, as_json: bool, **options: Any
) -> None:
    """Read all samples and list what is damaged: shard, sample, byte. Exit code 1 if anything is.

    Counts and digests of an MDS index are compared with its shards.
    """
    from cachefs.errors import FormatError
    from cachefs.progress import byte_bar, human_bytes

    from .checking import check_all
    from .dataset import Reader

    names = split_fields(fields)
    with open_data(url, options) as data:
        reader = Reader.of(data.format, decode_choice(decode), names)
        with byte_bar("checking", data.nbytes, show=not as_json) as advance:
            report = check_all(data, reader, workers=workers, advance=advance)
    listed = [damage.as_json() for damage in report.damages[:most]]
    if as_json:
        values = {"url": url, "format": data.format.name, **report.summary(), "damages": listed}
        click.echo(json.dumps(values))
    else:
        for damage in report.damages[:most]:
            click.echo(plain(str(damage)))
        if len(report.damages) > most:
            click.echo(f"and {len(report.damages) - most} more (--most)")
        for name, value in report.summary().items():
            click.echo(f"{name:<15} {human_bytes(value) if name.endswith('bytes') else value}")
    if report.damages:
        shards = len({damage.url for damage in report.damages})
        found = f"{len(report.damages)} damage{'s' if len(report.damages) > 1 else ''}"
        raise FormatError(
            f"{found} in {shards} of {len(data.stats)} shard{'s' if len(data.stats) > 1 else ''}", url=url
        )
