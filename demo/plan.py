"""How large the demo is: one frozen object, in a full and in a shrunken size."""

from __future__ import annotations

from dataclasses import asdict, dataclass

FORMATS = ("wds", "mds", "tokens")
"""The three data sets, in the order in which the training script lists them."""

RANKS = 2
EPOCHS = 2


@dataclass(frozen=True)
class Plan:
    """Sizes of data and training. All three data sets hold the same samples count and shard count."""

    samples: int
    """Samples in each data set."""
    shards: int
    """Shards in each data set."""
    length: int
    """Bytes of text in a sample; one byte is one token."""
    batch_size: int
    """Samples per rank, data set and step."""
    crop: int
    """Tokens of each sample that are trained on, so that the compute fits the time."""
    save_every: int
    """Steps between two checkpoints."""
    kill_at: int
    """The step of epoch 1 after which everything is killed."""
    least_bytes: int
    """The shards together must hold at least this much."""

    def __post_init__(self) -> None:
        if self.samples % self.shards or self.samples % (self.batch_size * RANKS):
            raise ValueError(f"{self.samples} samples do not divide into {self.shards} shards and equal batches")
        if not self.save_every < self.kill_at < self.steps_per_epoch or self.kill_at % self.save_every == 0:
            raise ValueError(f"kill_at {self.kill_at} must lie in epoch 1, between two checkpoints")
        if self.steps % self.save_every:
            raise ValueError(f"save_every {self.save_every} does not divide {self.steps} steps: no last checkpoint")

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // (self.batch_size * RANKS)

    @property
    def steps(self) -> int:
        return EPOCHS * self.steps_per_epoch

    @property
    def per_shard(self) -> int:
        """Samples in one shard."""
        return self.samples // self.shards

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


FULL = Plan(
    samples=2048,
    shards=16,
    length=2048,
    batch_size=4,
    crop=128,
    save_every=16,
    kill_at=138,
    least_bytes=15_000_000,
)
SMALL = Plan(
    samples=256,
    shards=8,
    length=1024,
    batch_size=4,
    crop=32,
    save_every=8,
    kill_at=20,
    least_bytes=1_000_000,
)
PLANS = {"full": FULL, "small": SMALL}
