"""``count``: how many samples a data set holds, from wherever that is cheapest to know."""

from __future__ import annotations

import json
from typing import Any

import click

from cachefs.commandline import json_option

from .options import open_data, source_options


@click.command()
@click.argument("url")
@click.option("--walk", is_flag=True, help="Count in the shards themselves, whatever an index beside them says.")
@source_options
@json_option
def count(url: str, walk: bool, as_json: bool, **options: Any) -> None:
    """Count the samples of a data set."""
    from cachefs.progress import byte_bar

    with open_data(url, options) as data:
        with byte_bar("counting", data.nbytes, show=not as_json) as advance:
            rows = data.rows(advance, use_index=not walk, strict=True)
        samples = sum(row.samples for row in rows)
        if as_json:
            by = "reading the shards" if walk else data.counted_by(rows)
            shown = {"url": url, "format": data.format.name, "shards": len(data.stats), "samples": samples}
            click.echo(json.dumps({**shown, "counted_by": by}))
        else:
            click.echo(samples)
