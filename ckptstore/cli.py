"""The ``ckptstore`` command. Errors are one line on standard error; ``--json`` prints one JSON value.

Exit codes: 0 done, 1 failed or damaged, 2 wrong usage, 130 interrupted. Nothing here imports torch or looks at rank
variables: it runs in a bare shell. Commands import what they need, so ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cachefs.commandline import given_origin, json_option, origin_options, plain, run
from cachefs.errors import CheckpointDamaged

if TYPE_CHECKING:
    from .layout import StepRef
    from .storage import Storage
    from .timeline import Timeline

F = TypeVar("F", bound=Callable[..., Any])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run(cli, "ckptstore", argv)


def _step(command: F) -> F:
    return click.option("--step", type=click.IntRange(min=0), help="The step (default: the newest).")(command)


def _open(url: str, origin: dict[str, Any]) -> Storage:
    from .storage import open_storage

    return open_storage(url, given_origin(origin))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nearflash", prog_name="ckptstore")
def cli() -> None:
    """Look at, verify and bring home the checkpoints of a store: s3://bucket/prefix, or a path."""


@cli.command()
@click.argument("url")
@click.option("--all", "everything", is_flag=True, help="Also the steps of abandoned timelines.")
@origin_options
@json_option
def ls(url: str, everything: bool, as_json: bool, **origin: Any) -> None:
    """List the steps that count, oldest first; the one that is loaded by default is marked as the latest."""
    from .timeline import not_found, read_timeline

    with _open(url, origin) as storage:
        timeline = read_timeline(storage)
        if not timeline.live and not (everything and timeline.others):
            raise not_found(storage, timeline, "there is no checkpoint")
        newest = _latest(storage, timeline)
        rows = [{**_row(storage, ref, timeline), "latest": ref == newest} for ref in _listed(timeline, everything)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from datetime import datetime

    from cachefs.progress import human_bytes

    click.echo(f"{'STEP':>12}  {'GENERATION':>10}  {'RANKS':>5}  {'TENSORS':>7}  {'SIZE':>10}  SAVED")
    for row in rows:
        if row["damage"]:
            rest = plain(f"damaged: {row['damage']}")
        else:
            saved = datetime.fromtimestamp(row["created"]).strftime("%Y-%m-%d %H:%M:%S")
            size = human_bytes(row["bytes"]) if row["bytes"] is not None else "-"
            tensors = row["tensors"] if row["tensors"] is not None else "-"
            rest = f"{row['world_size']:>5}  {tensors:>7}  {size:>10}  {saved}"
        mark = "  (latest)" if row["latest"] else "" if row["live"] else "  (abandoned)"
        click.echo(f"{row['step']:>12}  {row['generation']:>10}  {rest}{mark}")


@cli.command()
@click.argument("url")
@_step
@origin_options
@json_option
def show(url: str, step: int | None, as_json: bool, **origin: Any) -> None:
    """Show a step's tensors and values, without reading tensor data."""
    from .catalog import read_catalog
    from .choose import named_or_newest
    from .inspect import describe

    with _open(url, origin) as storage:
        catalog = read_catalog(storage, named_or_newest(storage, step))
    found = describe(catalog)
    if as_json:
        click.echo(json.dumps(found))
        return
    from cachefs.progress import human_bytes

    click.echo(f"{catalog.ref}, saved by {catalog.root.world_size} rank(s) of attempt {plain(catalog.root.attempt)}")
    for tensor in found["tensors"]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        extra = f"  = {tensor['alias_of']}" if tensor["alias_of"] else ""
        extra += f"  of rank {tensor['rank']}" if tensor["rank"] is not None else ""
        size = human_bytes(tensor["bytes"])
        click.echo(plain(f"{tensor['dtype']:>12}  {shape:>16}  {size:>10}  {tensor['name']}{extra}"))
    for name, value in found["values"].items():
        text = json.dumps(value)
        click.echo(plain(f"{'value':>12}  {name} = {text if len(text) <= 200 else text[:197] + '...'}"))


@cli.command()
@click.argument("url")
@click.option("--step", type=click.IntRange(min=0), help="Only this step (default: every step that counts).")
@click.option("--latest", is_flag=True, help="Only the newest step.")
@click.option("--quick", is_flag=True, help="Manifests and sizes only, not the digest of every byte.")
@origin_options
@json_option
def verify(url: str, step: int | None, latest: bool, quick: bool, as_json: bool, **origin: Any) -> None:
    """Check every step that counts byte by byte, and name what is damaged."""
    from cachefs.progress import byte_bar

    from .choose import named_or_newest
    from .timeline import read_timeline
    from .verify import verify_step

    if latest and step is not None:
        raise click.UsageError("--latest and --step exclude each other")
    rows = []
    with _open(url, origin) as storage:
        newest = named_or_newest(storage, step)  # the error says what is there
        one = latest or step is not None
        refs = [newest] if one else list(reversed(read_timeline(storage).live))
        for number, ref in enumerate(refs, 1):
            size = _row(storage, ref)["bytes"] or 0
            place = f" ({number} of {len(refs)})" if len(refs) > 1 else ""
            with byte_bar(f"step {ref.step}{place}", size, show=not (as_json or quick)) as advance:
                damages = verify_step(storage, ref, deep=not quick, on_bytes=advance)
            rows.append((ref, damages))
    if as_json:
        values = [
            {"step": r.step, "generation": r.generation, "damages": [dataclasses.asdict(d) for d in damages]}
            for r, damages in rows
        ]
        click.echo(json.dumps(values))
    else:
        for ref, damages in rows:
            click.echo(f"{ref}: {'damaged' if damages else 'sound'}")
            for damage in damages:
                click.echo(plain(f"  {damage}"))
        looked = "manifests and sizes" if quick else "every digest"
        click.echo(f"{len(rows)} step{'s' if len(rows) > 1 else ''} checked, {looked}")
    bad = [ref.step for ref, damages in rows if damages]
    if bad:
        steps = f"step{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
        raise CheckpointDamaged(f"damaged: {steps} of {len(rows)} checked", url=url)


@cli.command()
@click.argument("url")
@click.argument("out", type=click.Path())
@_step
@click.option("--only", multiple=True, help="Only these names or globs (model, optimizer/*); may be repeated.")
@origin_options
@json_option
def restore(url: str, out: str, step: int | None, only: tuple[str, ...], as_json: bool, **origin: Any) -> None:
    """Bring a step down into OUT, a new folder, which then is a store of its own with that one step."""
    from cachefs.progress import byte_bar, human_bytes

    from .copying import restore as bring

    def bar(total: int) -> Any:
        return byte_bar("restoring", total, show=not as_json)

    with _open(url, origin) as storage:
        copied = bring(storage, out, step=step, only=only or None, bar=bar)
    if as_json:
        click.echo(json.dumps({"step": copied.ref.step, "tensors": copied.tensors, "bytes": copied.nbytes, "out": out}))
    else:
        click.echo(
            f"step {copied.ref.step}: {copied.tensors} tensors, {human_bytes(copied.nbytes)}, verified, in {out}"
        )


def _listed(timeline: Timeline, everything: bool) -> list[StepRef]:
    return sorted((*timeline.live, *timeline.others)) if everything else list(reversed(timeline.live))


def _latest(storage: Storage, timeline: Timeline) -> StepRef | None:
    """What ``load()`` and ``latest()`` pick: the newest step whose manifests and sizes are sound."""
    from .verify import verify_step

    return next((ref for ref in timeline.live if not verify_step(storage, ref, deep=False)), None)


def _row(storage: Storage, ref: StepRef, timeline: Timeline | None = None) -> dict[str, Any]:
    """What the list shows of a step."""
    from .verify import read_root

    row: dict[str, Any] = {"step": ref.step, "generation": ref.generation}
    row["live"] = timeline is None or ref in timeline.live
    fields: dict[str, Any] = dict.fromkeys(("attempt", "world_size", "created", "tensors", "bytes", "damage"))
    try:
        root = read_root(storage, ref)
    except CheckpointDamaged as e:
        return {**row, **fields, "damage": str(e)}
    fields.update(attempt=root.attempt, world_size=root.world_size, created=root.created)
    fields.update({name: root.metadata.get(name) for name in ("tensors", "bytes")})
    return {**row, **fields}
