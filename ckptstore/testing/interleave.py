"""Runs several attempts against one model store, one request at a time, in an order that the caller decides.

Each program runs in a thread, but only ever one of them: it stops before every gated request until it is its turn.
So a run is a pure function of the choices made, and all runs with few changes of turn can be enumerated
(:func:`enumerate_runs`; bounded preemption, as in Musuvathi and Qadeer, "Iterative Context Bounding for Systematic
Testing of Multithreaded Programs", PLDI 2007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cachefs.errors import DeadlineExceeded

from ..storage_object import ObjectStorage
from .model import Fault, Killed, ModelStore, Request

DEADLINE = 30.0

Program = Callable[[ObjectStorage], None]
Choose = Callable[[list[str], str | None], str]
Inject = Callable[[Request, int], Fault]


@dataclass
class _Actor:
    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    waiting: bool = False
    requests: int = 0
    error: BaseException | None = None


def gated(request: Request) -> bool:
    """Requests whose order matters: all but reads of what never changes once it is there."""
    return request.writes or request.op == "list" or (request.op == "get" and request.key.endswith("manifest.json"))


def run(
    model: ModelStore,
    programs: Mapping[str, Program],
    choose: Choose,
    inject: Inject = lambda request, number: Fault.NONE,
) -> dict[str, BaseException | None]:
    """Run all programs to their ends. ``choose(waiting, last)`` names whose turn it is; ``inject(request, number)``
    orders faults (``number`` counts that attempt's requests). Returns what each program raised."""
    stopped = threading.Semaphore(0)
    actors = {name: _Actor(name) for name in programs}

    def hook(actor: _Actor) -> Callable[[Request], Fault]:
        def before(request: Request) -> Fault:
            if threading.current_thread() is not actor.thread or not gated(request):
                return Fault.NONE
            actor.waiting = True
            stopped.release()
            if not actor.turn.acquire(timeout=DEADLINE):
                raise DeadlineExceeded(f"{actor.name} was never given a turn")
            actor.waiting = False
            actor.requests += 1
            return inject(request, actor.requests - 1)

        return before

    def body(actor: _Actor, program: Program) -> None:
        try:
            program(model.storage(actor.name, hook(actor)))
        except BaseException as e:  # noqa: BLE001 - handed to the caller, who knows what may be raised
            actor.error = e
        finally:
            stopped.release()

    def wait() -> None:
        if not stopped.acquire(timeout=DEADLINE):
            raise DeadlineExceeded("a program neither ended nor asked for a turn")

    for name, program in programs.items():
        actor = actors[name]
        actor.thread = threading.Thread(target=body, args=(actor, program), name=name, daemon=True)
        actor.thread.start()
        wait()
    last: str | None = None
    while waiting := [name for name, actor in actors.items() if actor.waiting]:
        last = choose(waiting, last)
        actors[last].waiting = False
        actors[last].turn.release()
        wait()
    for actor in actors.values():
        assert actor.thread is not None
        actor.thread.join(DEADLINE)
    return {name: None if isinstance(actor.error, Killed) else actor.error for name, actor in actors.items()}


def enumerate_runs(preemptions: int) -> Iterator[Choose]:
    """A ``choose`` for every run in which at most ``preemptions`` times a program that could go on has to wait.

    Use each for one :func:`run` of programs that do the same every time, before taking the next.
    """
    pending: list[tuple[str, ...]] = [()]
    while pending:
        prefix = pending.pop()
        steps: list[tuple[list[str], str | None, str]] = []

        def choose(
            waiting: list[str],
            last: str | None,
            prefix: tuple[str, ...] = prefix,
            steps: list[tuple[list[str], str | None, str]] = steps,
        ) -> str:
            if len(steps) < len(prefix):
                chosen = prefix[len(steps)]
            else:
                chosen = last if last in waiting else waiting[0]
            steps.append((waiting, last, chosen))
            return chosen

        yield choose
        taken = [chosen for _, _, chosen in steps]
        spent = 0
        for number, (waiting, last, chosen) in enumerate(steps):
            if number >= len(prefix):
                for other in waiting:
                    if other != chosen and spent + (last in waiting and other != last) <= preemptions:
                        pending.append((*taken[:number], other))
            spent += last in waiting and chosen != last
