"""``inspect``: what a data set is: format, shards, counts, fields, and what is odd about it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from cachefs.commandline import json_option, plain

from .options import open_data, source_options

if TYPE_CHECKING:
    from ..counting import Row
    from ..formats import Format
    from .dataset import DataSet

_MOST_ODD = 100
_LOOK = 16
"""Samples that are looked at for their fields."""


@click.command()
@click.argument("url")
@click.option("--shards", "most", type=click.IntRange(min=0), default=20, show_default=True, help="Shards to list.")
@source_options
@json_option
def inspect(url: str, most: int, as_json: bool, **options: Any) -> None:
    """Show format, shards, samples and fields of a data set, and what is odd about it. Damage is shown, not raised."""
    from cachefs.progress import byte_bar

    with open_data(url, options) as data:
        with byte_bar("counting", data.nbytes, show=not as_json) as advance:
            rows = data.rows(advance)
        found = describe(data, rows)
    found["shard_table"] = found["shard_table"][:most]
    found["odd"] = found["odd"][:_MOST_ODD]
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def describe(data: DataSet, rows: list[Row]) -> dict[str, Any]:
    """All that is shown, as JSON types."""
    damaged = [row for row in rows if row.error is not None]
    fields, unread = _fields(data)
    odd = [note for row in rows for note in row.notes]
    odd += [str(row.error) for row in damaged]
    odd += [f"cannot be read: {error}" for error in unread]
    return {
        "url": data.url,
        "format": data.format.name,
        "options": _given(data.format),
        "objects": len(data.stats),
        "shards": len(rows),
        "samples": sum(row.samples for row in rows),
        "bytes": data.nbytes,
        "index": data.counts is not None,
        "counted_by": data.counted_by(rows),
        "damaged_shards": len(damaged),
        "skipped_entries": sum(row.skipped for row in rows),
        "fields": fields,
        "odd": odd,
        "shard_table": [_row(row) for row in rows],
    }


def _given(format: Format) -> dict[str, Any]:
    """The options of a format that are not its defaults."""
    values = format.options()
    return {f.name: values[f.name] for f in dataclasses.fields(format) if getattr(format, f.name) != f.default}


def _row(row: Row) -> dict[str, Any]:
    return {
        "url": row.stat.url,
        "part": row.part if row.part >= 0 else None,
        "bytes": row.stat.size if row.size < 0 else row.size,
        "samples": row.samples,
        "skipped": row.skipped,
        "error": None if row.error is None else str(row.error),
    }


def _fields(data: DataSet) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Per field the types that the first samples have in it, and in how many it is; and what could not be read."""
    from cachefs.errors import DataError

    from .dataset import Reader
    from .values import type_of

    reader = Reader.of(data.format, None, None)
    types: dict[str, Counter[str]] = {}
    unread: list[str] = []
    looked = 0
    for number in range(len(data.stats)):
        if looked >= _LOOK:
            break
        there = 0
        try:
            for shard in data.opened(number):
                there += len(shard.index)
                for i in range(min(len(shard.index), _LOOK - looked)):
                    looked += 1
                    try:
                        sample = reader(shard, i)
                    except DataError as e:
                        unread.append(str(e))
                        continue
                    for name, value in sample.items():
                        types.setdefault(name, Counter())[type_of(value)] += 1
                if looked >= _LOOK and data.counts is None:
                    break
            if data.counts is not None and there != data.counts[number]:
                url = data.stats[number].url
                unread.append(f"{url} holds {there} samples, the index beside it says {data.counts[number]}")
        except DataError as e:
            if data.counts is not None:  # else the shard's row says so
                unread.append(str(e))
    seen = {name: {"types": list(counts), "in": counts.total(), "of": looked} for name, counts in types.items()}
    return seen, unread


def _damaged(found: dict[str, Any]) -> str:
    if found["index"]:
        return "not looked for, since an index tells the counts; check reads all samples"
    return f"{found['damaged_shards']} of these shards" if found["damaged_shards"] else ""


def _show(found: dict[str, Any]) -> None:
    from cachefs.progress import human_bytes

    options = ", ".join(f"{name}={value!r}" for name, value in found["options"].items())
    parts = "" if found["objects"] == found["shards"] else f" parts of {found['objects']} objects"
    options = options if len(options) <= 100 else f"{options[:100]}..."
    for name, value in (
        ("url", found["url"]),
        ("format", f"{found['format']}{f' ({options})' if options else ''}"),
        ("shards", f"{found['shards']}{parts}"),
        ("samples", found["samples"]),
        ("size", f"{human_bytes(found['bytes'])} ({found['bytes']} bytes)"),
        ("counts from", found["counted_by"]),
        ("skipped", f"{found['skipped_entries']} entries belong to no sample" if found["skipped_entries"] else ""),
        ("damaged", _damaged(found)),
    ):
        if value != "":
            click.echo(plain(f"{name:<12} {value}"))
    if found["fields"]:
        looked = max(field["of"] for field in found["fields"].values())
        click.echo(f"\nfields of the first {f'{looked} samples' if looked > 1 else 'sample'}")
        width = max(map(len, found["fields"]))
        for name, field in found["fields"].items():
            missing = "" if field["in"] == field["of"] else f"  (in {field['in']} of {field['of']})"
            shown = field["types"][:4] + (["..."] if len(field["types"]) > 4 else [])
            click.echo(plain(f"  {name:<{width}}  {', '.join(shown)}{missing}"))
    if found["odd"]:
        click.echo("\nproblems")
        for text in found["odd"][:20]:
            click.echo(plain(f"  {text}"))
        if len(found["odd"]) > 20:
            click.echo(f"  and {len(found['odd']) - 20} more")
    if found["shard_table"]:
        click.echo(f"\n{'SAMPLES':>10}  {'SIZE':>10}  SHARD")
        for row in found["shard_table"]:
            part = "" if row["part"] is None else f" part {row['part']}"
            state = "  (damaged)" if row["error"] else ""
            click.echo(plain(f"{row['samples']:>10}  {human_bytes(row['bytes']):>10}  {row['url']}{part}{state}"))
        if len(found["shard_table"]) < found["shards"]:
            click.echo(f"{'':>10}  {'':>10}  and {found['shards'] - len(found['shard_table'])} more (--shards)")
