"""What happens to a save after staging, on one rank's background thread: digests, a plan, files, one commit.

All ranks run :meth:`Uploader.run` alike and meet in one :class:`.ranks.Round`::

    every rank      tells "report": what it holds, with digests            (or a Failure)
    coordinator     hears all, plans, claims a generation, says "orders"   (or a Failure)
    every rank      writes its segments and, leading a node, its part; tells "done"   (or a Failure)
    coordinator     hears all, commits, says "end"                         (or a Failure)
    every rank      reads "end"

So a save succeeds on all ranks or fails on all, by one error or another, and nothing is left of a failed one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cachefs.errors import RankFailed
from cachefs.hashing import tensor_digest

from .boxes import split
from .commit import StepWriter, begin_step
from .direct import Directed, direct
from .dtypes import itemsize
from .layout import StepRef, segment_name
from .manifest import Root
from .parallel import run_bounded
from .ranks import EVERYBODY, leave
from .records import Done, Failure, Go, Held, Orders, Piece, Report, failure_of
from .segments import CHUNK_BYTES, SEGMENT_BYTES, segment_layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cachefs.clock import Clock

    from .claims import Claim
    from .ranks import Meeting, Round
    from .staging import Staged
    from .storage import Storage

logger = logging.getLogger(__name__)

TOLD = ("report", "done")
SAID = ("orders", "order", "end")


@dataclass(frozen=True)
class SaveOptions:
    """How saves are cut up. ``parallel``: segments that one rank writes at a time."""

    chunk_bytes: int = CHUNK_BYTES
    segment_bytes: int = SEGMENT_BYTES
    parallel: int = 4


@dataclass(frozen=True)
class Content:
    """What one rank saves: its structure (JSON), the names below which ranks keep their own, and its tensors."""

    structure: bytes
    own: tuple[str, ...]
    staged: Staged


@dataclass(frozen=True)
class SaveJob:
    """One save on one rank. ``name``: the conversation's, equal on all ranks. ``content`` may be the error for which
    this rank has nothing to save: then it takes part only to say so."""

    step: int
    name: str
    content: Content | BaseException
    may_differ: Callable[[str], bool]
    on_staged: Callable[[], None]


class Uploader:
    """Carries out the saves of one rank, one at a time. ``claim`` gets the step; asked on the coordinator only."""

    def __init__(
        self,
        storage: Storage,
        meeting: Meeting,
        claim: Callable[[int], Claim],
        options: SaveOptions,
        rank_timeout: float,
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._meeting = meeting
        self._claim = claim
        self._options = options
        self._rank_timeout = rank_timeout
        self._clock = clock

    def run(self, job: SaveJob) -> StepRef:
        """Carry out one save; returns when it is durable and acknowledged. Raises what failed, here or elsewhere.

        Ends in bounded time: every wait for other ranks has a deadline, and so has every request to the store.
        """
        conversation = self._meeting.round(job.name, self._rank_timeout)
        try:
            return self._converse(conversation, job)
        finally:
            leave(conversation, TOLD, SAID)

    def _converse(self, conversation: Round, job: SaveJob) -> StepRef:
        try:
            if isinstance(job.content, BaseException):
                raise job.content
            report = self._report(job, job.content)
        except BaseException as e:
            self._tell_failure(conversation, "report", e)
            raise
        conversation.tell("report", _encode(report))
        plan = self._give_orders(conversation, job) if self._meeting.coordinator else None
        go = _answer(conversation.read("orders", EVERYBODY))
        orders = msgspec.msgpack.decode(conversation.read("order", self._meeting.rank), type=Orders)
        writer: StepWriter | None = None
        try:
            writer = begin_step(self._storage, job.step, go.generation, go.attempt, clock=self._clock)
            self._write(writer, go, orders, job.content.staged)
        except BaseException as e:
            self._tell_failure(conversation, "done", e)
            self._abort(writer, manifest_sent=False)
            raise
        conversation.tell("done", _encode(Done()))
        if plan is not None:
            self._commit(conversation, writer, go, plan, job.step)
        self._await_end(conversation, writer)
        return writer.ref

    def _report(self, job: SaveJob, content: Content) -> Report:
        staged = content.staged
        staged.ready.wait()
        job.on_staged()
        held = [
            Held(
                name=t.name,
                dtype=t.dtype,
                shape=t.shape,
                offsets=t.box.offsets,
                extent=t.box.shape,
                digests=tuple(tensor_digest(v) for v in _chunk_views(staged, i, self._options.chunk_bytes)),
                rule=t.rule,
                alias_of=t.alias_of,
            )
            for i, t in enumerate(staged.tensors)
        ]
        meeting = self._meeting
        return Report(meeting.rank, meeting.node, job.step, content.structure, tuple(held), content.own)

    def _give_orders(self, conversation: Round, job: SaveJob) -> Directed:
        """The coordinator's first half: hear the reports, plan, tell everybody what to write."""
        try:
            reports = _hear(conversation, "report", Report | Failure, job.step)
            claim = self._claim(job.step)
            directed = direct(
                reports,
                Go(claim.generation, claim.attempt),
                step=job.step,
                may_differ=job.may_differ,
                chunk_bytes=self._options.chunk_bytes,
                segment_bytes=self._options.segment_bytes,
            )
            for rank, orders in enumerate(directed.orders):
                conversation.say("order", rank, _encode(orders))
        except BaseException as e:
            self._say_failure(conversation, "orders", failure_of(e))
            raise
        conversation.say("orders", EVERYBODY, _encode(directed.go))
        return directed

    def _write(self, writer: StepWriter, go: Go, orders: Orders, staged: Staged) -> None:
        index = {t.name: i for i, t in enumerate(staged.tensors)}

        def write(numbered: tuple[int, tuple[Piece, ...]]) -> None:
            number, pieces = numbered
            buffers: list[Buffer] = [segment_layout(pieces, writer.ref.step).header]
            for piece in pieces:
                views = _chunk_views(staged, index[piece.name], self._options.chunk_bytes)
                buffers.extend(views[piece.first : piece.first + len(piece.chunks)])
            writer.write(segment_name(go.attempt, self._meeting.rank, number), buffers)

        for _ in run_bounded(write, enumerate(orders.segments), workers=self._options.parallel):
            pass
        if orders.part is not None:
            file, content = orders.part
            writer.write(file, [content])

    def _commit(self, conversation: Round, writer: StepWriter, go: Go, plan: Directed, step: int) -> None:
        """The coordinator's second half: hear that all is written, commit, tell everybody."""
        try:
            _hear(conversation, "done", Done | Failure, step)
            root = Root(
                step=step,
                generation=go.generation,
                attempt=go.attempt,
                world_size=self._meeting.world,
                created=self._clock.time(),
                parts=plan.parts,
                metadata={"bytes": sum(f.size for f in plan.files), "tensors": plan.tensors},
            )
            writer.commit(root, plan.files)
        except BaseException as e:
            self._say_failure(conversation, "end", failure_of(e, manifest_sent=writer.manifest_sent))
            self._abort(writer, manifest_sent=writer.manifest_sent)
            raise
        conversation.say("end", EVERYBODY, _encode(Done()))

    def _await_end(self, conversation: Round, writer: StepWriter) -> None:
        try:
            end = msgspec.msgpack.decode(conversation.read("end", EVERYBODY), type=Done | Failure)
        except RankFailed:
            self._abort(writer, manifest_sent=True)
            raise
        if isinstance(end, Failure):
            self._abort(writer, manifest_sent=end.manifest_sent)
            raise end.error()

    def _tell_failure(self, conversation: Round, stage: str, error: BaseException) -> None:
        """Let the others know that this rank has failed; the coordinator fails the save itself."""
        failure = failure_of(error)
        try:
            conversation.tell(stage, _encode(failure))
        except RankFailed as e:  # they will find out by their deadlines; the caller raises the first error
            logger.warning("%s: the other ranks could not be told: %s", error, e)
        if self._meeting.coordinator:
            self._say_failure(conversation, {"report": "orders", "done": "end"}[stage], failure)

    def _say_failure(self, conversation: Round, stage: str, failure: Failure) -> None:
        try:
            conversation.say(stage, EVERYBODY, _encode(failure))
        except RankFailed as e:  # as in _tell_failure
            logger.warning("%s: the other ranks could not be told: %s", failure.what, e)

    def _abort(self, writer: StepWriter | None, *, manifest_sent: bool) -> None:
        for problem in writer.abort(manifest_sent=manifest_sent) if writer is not None else ():
            logger.warning("left behind by a failed save, and no checkpoint: %s", problem)


def _hear(conversation: Round, stage: str, kind: Any, step: int) -> list[Any]:
    """What every rank says. Raises :class:`RankFailed` if it is a failure on some, or nothing by the deadline."""
    answers = [msgspec.msgpack.decode(data, type=kind) for data in conversation.hear(stage)]
    failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
    if failed:
        rank, failure = failed[0]
        raise RankFailed(
            f"step {step} was not saved: rank {rank}: {failure.kind}: {failure.error()}"
            + (f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else "")
        )
    return answers


def _answer(data: bytes) -> Go:
    answer = msgspec.msgpack.decode(data, type=Go | Failure)
    if isinstance(answer, Failure):
        raise answer.error()
    return answer


def _chunk_views(staged: Staged, index: int, chunk_bytes: int) -> list[memoryview]:
    """The chunks of one staged tensor, as the plan cuts them."""
    tensor = staged.tensors[index]
    size = itemsize(tensor.dtype)
    views, start = [], tensor.start
    for box in split(tensor.box, size, chunk_bytes):
        views.append(staged.memory[start : start + box.volume * size])
        start += box.volume * size
    return views


def _encode(record: Any) -> bytes:
    return msgspec.msgpack.encode(record)
