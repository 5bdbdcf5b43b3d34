"""Megatron pairs and llm.c files that their own tools wrote, read by sequence, by document, and by window."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import loader
from loader.formats import LlmC, Megatron
from loader.testing import mapped_at

DATA = Path(__file__).parent / "data"
TOKENS = DATA / "tokens"
PAIRS = ["megatron_i32", "megatron_u16"]


def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "expect" / f"tokens__{name}.json").read_text())
    return document


def check(sample: Any, wanted: dict[str, Any]) -> None:
    assert set(sample) == set(wanted["fields"])
    for name, want in wanted["fields"].items():
        value = np.asarray(sample[name])
        assert (value.dtype.name, list(value.shape)) == (want["dtype"], want["shape"])
        assert hashlib.sha256(np.ascontiguousarray(value)).hexdigest() == want["sha256"]


def check_all(samples: Any, wanted: list[dict[str, Any]]) -> None:
    samples = list(samples)
    assert len(samples) == len(wanted)
    for sample, want in zip(samples, wanted, strict=True):
        check(sample, want)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("suffix", [".bin", ".idx", ""])
def test_every_sequence_is_read_by_the_name_of_either_file(name: str, suffix: str) -> None:
    reader = loader.open_shard(TOKENS / (name + suffix))
    assert reader.format == Megatron()
    check_all(reader, expected(name)["samples"])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pair_is_a_data_set(name: str, workers: int) -> None:
    ds = loader.ShardDataset(TOKENS / f"{name}.bin", batch_size=1, shuffle=False)
    loaded = DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=lambda samples: samples[0])
    check_all(loaded, expected(name)["samples"])


@pytest.mark.parametrize("name", PAIRS)
def test_documents_are_their_sequences_joined(name: str) -> None:
    document = expected(name)
    bounds = document["document_indices"]
    sequences = [sample["tokens"] for sample in loader.open_shard(TOKENS / f"{name}.bin")]
    documents = loader.open_shard(TOKENS / f"{name}.bin", Megatron(sample="document"))
    assert len(documents) == len(bounds) - 1 == max(s["document"] for s in document["samples"]) + 1
    for sample, first, last in zip(documents, bounds, bounds[1:], strict=False):
        assert np.array_equal(sample["tokens"], np.concatenate(sequences[first:last]))


@pytest.mark.parametrize("name", PAIRS)
def test_windows_run_over_all_documents(name: str) -> None:
    whole = np.concatenate([sample["tokens"] for sample in loader.open_shard(TOKENS / f"{name}.bin")])
    format = Megatron(length=50, stride=30, labels=True, out="int64")
    ds = loader.ShardDataset(TOKENS / f"{name}.bin", batch_size=3, shuffle=False, format=format, drop_last=False)
    tokens = np.concatenate([np.asarray(batch["tokens"]) for batch in ds.batched()])
    labels = np.concatenate([np.asarray(batch["labels"]) for batch in ds.batched()])
    starts = range(0, len(whole) - 50, 30)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [whole[k : k + 50].tolist() for k in starts]
    assert labels.tolist() == [whole[k + 1 : k + 51].tolist() for k in starts]
    samples = [sample["tokens"].tolist() for sample in loader.open_shard(TOKENS / f"{name}.bin", format)]
    assert samples == tokens.tolist()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_tokens_are_the_files_own_bytes() -> None:
    at = 0
    for sample in loader.open_shard(TOKENS / "megatron_u16.idx"):
        file, offset = mapped_at(sample["tokens"])
        assert Path(file).samefile(TOKENS / "megatron_u16.bin") and offset == at
        at += sample["tokens"].nbytes
    [sample] = loader.open_shard(TOKENS / "llmc_train.bin")
    assert mapped_at(sample["tokens"]) == (str(TOKENS / "llmc_train.bin"), 1024)


def test_an_llmc_file_is_one_sample() -> None:
    reader = loader.open_shard(TOKENS / "llmc_train.bin")
    [want] = expected("llmc_train.bin")["samples"]
    check_all(reader, [want])
    assert reader.format == LlmC()
    assert reader[0]["tokens"][:4].tolist() == want["first"] and reader[0]["tokens"][-4:].tolist() == want["last"]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_llmc_file_is_a_data_set_of_windows(workers: int) -> None:
    [whole] = loader.open_shard(TOKENS / "llmc_train.bin")
    ds = loader.ShardDataset(TOKENS / "llmc_train.bin", batch_size=5, shuffle=False, format=LlmC(length=100))
    loaded = DataLoader(ds.batched(), batch_size=None, num_workers=workers)
    rows = np.concatenate([np.asarray(batch["tokens"]) for batch in loaded])
    assert np.array_equal(rows, whole["tokens"][:15000].reshape(150, 100))
