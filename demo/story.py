"""The main job told from beginning to end: make, upload, train, kill, train on, compare, show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cachefs.client import connect
from cachefs.config import Settings
from ckptstore import CheckpointStore

from .checks import Check, Evidence, Ranks, all_checks
from .job import Job, Run
from .picture import draw
from .plan import RANKS, Plan
from .record import Step
from .report import curves, print_table, results, write_json
from .screen import Advance, Screen
from .shards import ShardFile, make_shards
from .stage import DATA, Stage, open_stage
from .traffic import Get
from .upload import upload


def tell(out: Path, plan: Plan, screen: Screen) -> list[Check]:
    """The whole demo. Leaves ``main-job.png``, ``results.json`` and the jobs' logs in ``out``; returns the checks.

    Whatever ends it, every process that it started is gone when this returns or raises.
    """
    with open_stage(out, plan, screen) as stage:
        files = _data(stage, out / "data")
        killed = _killed_run(stage)
        whole = _uninterrupted_run(stage)
        with stage.part("verifying every byte of the checkpoints"):
            verified, damaged = _verify(stage, killed.run)
        evidence = Evidence(
            plan=plan,
            shards={f.key: f.size for f in files if f.is_shard},
            first=killed.first,
            second=killed.second,
            reference=whole.steps,
            gets=killed.gets,
            reference_gets=whole.gets,
            killed_at=killed.at,
            saved_before=killed.saved,
            verified=verified,
            damaged=damaged,
            counted=whole.counted,
            left=whole.left,
        )
    checks = all_checks(evidence)
    draw(curves(evidence), out / "main-job.png")
    write_json(out / "results.json", results(evidence, checks, stage.seconds))
    print_table(screen.console, checks)
    return checks


@dataclass(frozen=True)
class Killed:
    """The run that was killed at ``at`` (wall-clock second), when ``saved`` was the newest committed step, and started
    again."""

    run: Run
    first: Ranks
    second: Ranks
    gets: list[Get]
    at: float
    saved: int


@dataclass(frozen=True)
class Whole:
    """The uninterrupted run, what its daemon counted, and how many processes outlived both."""

    steps: Ranks
    gets: list[Get]
    counted: dict[str, float]
    left: int


def _data(stage: Stage, folder: Path) -> list[ShardFile]:
    with stage.part("making shards of the standard library's text in three formats"):
        files = make_shards(folder, stage.plan)
    total = sum(f.size for f in files)
    with stage.part(f"uploading {len(files)} objects, {total / 1e6:.1f} MB, with minio", len(files)) as advance:
        upload(files, stage.server.origin, DATA, done=lambda count: advance(count, ""))
    return files


def _killed_run(stage: Stage) -> Killed:
    run, plan = stage.run("killed"), stage.plan
    since = time.time()
    with stage.part(f"training on {RANKS} ranks, killed after step {plan.kill_at}", plan.steps) as advance:
        job = stage.launch(run)
        job.until(plan.kill_at, _told(stage, advance, since))
        saved, at = stage.committed(run), time.time()
        count = job.kill()
        first = _steps(job)
    stage.screen.say(f"  [yellow]SIGKILL[/] to {count} processes: torchrun, ranks, loader workers and the node daemon")
    with stage.part("the same command again, to the end", plan.steps) as advance:
        job = stage.launch(run)
        job.finish(_told(stage, advance, since))
        second = _steps(job)
        job.kill()
    return Killed(run, first, second, stage.gets(since), at, saved)


def _uninterrupted_run(stage: Stage) -> Whole:
    run, since = stage.run("uninterrupted"), time.time()
    with stage.part("an uninterrupted run to compare with", stage.plan.steps) as advance:
        job = stage.launch(run)
        job.finish(_told(stage, advance, since))
        settings = Settings.load({}, cache_dir=run.cache_dir, autostart=False, origin=stage.origin)
        with connect(settings) as client:
            counted = {k: float(v) for k, v in client.stats().items() if isinstance(v, int | float)}
            client.stop_daemon()
        left = job.left(deadline=20.0)
        job.kill()
    return Whole(_steps(job), stage.gets(since), counted, left)


def _told(stage: Stage, advance: Advance, since: float) -> Callable[[Step], None]:
    def on_step(step: Step) -> None:
        fetched = sum(g.size for g in stage.gets(since))
        advance(
            step.step, f"epoch {step.epoch + 1}, loss {float.fromhex(step.loss):.2f}, {fetched / 1e6:.1f} MB fetched"
        )

    return on_step


def _steps(job: Job) -> Ranks:
    return [list(job.steps(rank)) for rank in range(RANKS)]


def _verify(stage: Stage, run: Run) -> tuple[list[int], list[str]]:
    """Steps whose every byte is right, and what is wrong with the others."""
    good, damaged = [], []
    with CheckpointStore(run.checkpoints, origin=stage.origin) as store:
        for step in store.steps():
            found = store.verify(step)
            if found:
                damaged.append(f"step {step}: {found[0]}")
            else:
                good.append(step)
    return good, damaged
