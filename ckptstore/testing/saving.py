"""Small checkpoints made through the public steps of a save, and the proof that one of them is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import CheckpointError
from cachefs.hashing import tensor_digest

from ..claims import Claim
from ..commit import StepWriter, begin_step
from ..layout import StepRef, part_name, segment_name
from ..manifest import Chunk, FileRef, Part, PartRef, Root, TensorEntry, encode_part, part_ref
from ..storage import Storage
from ..verify import verify_step


class InstantClock:
    """A clock whose pauses take no time; ``time`` and ``monotonic`` count them."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def asleep(self, seconds: float) -> None:
        self.now += seconds


class Node(NamedTuple):
    """What one node hands the coordinator."""

    part: PartRef
    files: list[FileRef]


def write_node(writer: StepWriter, node: int, payloads: Sequence[bytes]) -> Node:
    """Write one segment per payload, each holding one tensor ``t<node>.<i>`` of bytes, and the node's part."""
    files: list[FileRef] = []
    tensors: list[TensorEntry] = []
    for number, payload in enumerate(payloads):
        file = segment_name(writer.attempt, node, number)
        middle = len(payload) // 2
        writer.write(file, [payload[:middle], payload[middle:]])
        files.append(FileRef(file, len(payload)))
        chunks = tuple(
            Chunk((start,), (end - start,), file, start, end, tensor_digest(payload[start:end]))
            for start, end in ((0, middle), (middle, len(payload)))
        )
        tensors.append(TensorEntry(f"t{node}.{number}", "U8", (len(payload),), chunks))
    data = encode_part(Part(attempt=writer.attempt, node=node, tensors=tuple(tensors), files=tuple(files)))
    name = part_name(writer.attempt, node)
    writer.write(name, [data])
    return Node(part_ref(name, data), files)


def root_of(writer: StepWriter, nodes: Sequence[Node], clock: Clock = SYSTEM_CLOCK) -> Root:
    """The commit record over some nodes' parts."""
    return Root(
        step=writer.ref.step,
        generation=writer.ref.generation,
        attempt=writer.attempt,
        world_size=len(nodes),
        created=clock.time(),
        parts=tuple(node.part for node in nodes),
    )


def save_step(
    storage: Storage, claim: Claim, step: int, *, nodes: int = 1, salt: str = "", clock: Clock = SYSTEM_CLOCK
) -> StepRef:
    """Save one step from begin to acknowledgement; its content tells step, attempt and ``salt``."""
    writer = begin_step(storage, step, claim.generation, claim.attempt, clock=clock)
    written = [
        write_node(writer, node, [f"{claim.attempt} {step} {node} {salt}".encode() * 3]) for node in range(nodes)
    ]
    writer.commit(root_of(writer, written, clock), [file for node in written for file in node.files])
    return writer.ref


def require_sound(storage: Storage, ref: StepRef) -> None:
    """Raise :class:`CheckpointError` unless every byte of a checkpoint is what it must be."""
    damages = verify_step(storage, ref, deep=True)
    if damages:
        raise CheckpointError(f"{ref} does not verify: {'; '.join(map(str, damages))}", url=storage.url)
