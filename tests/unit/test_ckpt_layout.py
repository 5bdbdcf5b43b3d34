"""Names: one spelling each way, strict parsing, and attempt ids that can hold anything."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CheckpointError, ConfigError
from ckptstore.layout import (
    PartName,
    SegmentName,
    StepRef,
    attempt_token,
    check_file,
    claim_name,
    parse_claim,
    parse_part,
    parse_segment,
    parse_start,
    parse_step,
    parse_temp,
    part_name,
    resolve,
    segment_name,
    start_name,
)

generations = st.integers(1, 10**9)
steps = st.integers(0, 10**15)
attempts = st.text(min_size=1, max_size=300)

SAFE = re.compile(r"[a-z0-9_]{1,32}|[a-z0-9_]{1,24}-[0-9a-f]{16}")


def test_the_names_of_the_design() -> None:
    ref = StepRef(100, 3)
    assert claim_name(3) == "generations/000003.json"
    assert start_name(3) == "generations/000003.start.json"
    assert ref.folder == "step-000000000100-g000003"
    assert ref.manifest == "step-000000000100-g000003/manifest.json"
    assert part_name("run_7", 4) == "run_7-p0004.json"
    assert segment_name("run_7", 12, 3) == "run_7-r00012-0003.safetensors"
    assert ref.temp_folder("run_7") == ".tmp-step-000000000100-g000003-run_7"
    assert str(ref) == "step 100 (generation 3)"


@given(step=steps, generation=generations, attempt=attempts, number=st.integers(0, 10**7), rank=st.integers(0, 10**7))
def test_every_name_parses_back(step: int, generation: int, attempt: str, number: int, rank: int) -> None:
    ref = StepRef(step, generation)
    assert parse_step(ref.folder) == ref
    assert parse_claim(claim_name(generation)) == generation
    assert parse_start(start_name(generation)) == generation
    assert parse_temp(ref.temp_folder(attempt)) == (ref, attempt_token(attempt))
    assert parse_temp(f"{ref.temp_folder(attempt)}.dead-0123456789abcdef") == (ref, attempt_token(attempt))
    assert parse_part(part_name(attempt, rank)) == PartName(attempt_token(attempt), rank)
    assert parse_segment(segment_name(attempt, rank, number)) == SegmentName(attempt_token(attempt), rank, number)


@given(attempt=attempts)
def test_an_attempt_id_becomes_a_short_harmless_token(attempt: str) -> None:
    token = attempt_token(attempt)
    assert SAFE.fullmatch(token)
    check_file(part_name(attempt, 0))
    check_file(segment_name(attempt, 0, 0))


@pytest.mark.parametrize(
    "one, other",
    [
        ("job", "JOB"),
        ("a/b", "a_b"),
        ("../../etc/passwd", "______etc_passwd"),
        ("é", "e\u0301"),
        ("x" * 33, "x" * 34),
        ("x" * 400, "x" * 401),
        ("a b", "a\nb"),
        ("\0", "_"),
        ("a-p0001", "a_p0001"),
        ("a", attempt_token("A")),
    ],
)
def test_different_ids_never_share_a_token(one: str, other: str) -> None:
    assert attempt_token(one) != attempt_token(other)


@given(st.lists(attempts, min_size=2, max_size=2, unique=True))
def test_tokens_of_different_ids_differ(pair: list[str]) -> None:
    assert attempt_token(pair[0]) != attempt_token(pair[1])


def test_a_plain_id_stands_for_itself_and_an_empty_one_is_refused() -> None:
    assert attempt_token("job_17") == "job_17"
    with pytest.raises(ConfigError, match="empty attempt id"):
        attempt_token("")


@pytest.mark.parametrize(
    "folder",
    [
        "step-100-g3",
        "step-0000000000100-g000003",
        "step-000000000100-g0000003",
        "step-000000000100-g000000",
        "step-000000000100-g000003/",
        "step-000000000100-g000003 ",
        "step-000000000100-g000003\n",
        "step-00000000010٣-g000003",
        "Step-000000000100-g000003",
        ".tmp-step-000000000100-g000003-a",
        "step--00000000100-g000003",
        "",
    ],
)
def test_a_folder_that_is_not_exactly_a_steps_belongs_to_somebody_else(folder: str) -> None:
    assert parse_step(folder) is None


@pytest.mark.parametrize(
    "name",
    [
        "generations/3.json",
        "generations/000000.json",
        "generations/0000003.json",
        "000003.json",
        "generations/000003.json.bak",
        "generations/.tmp-0011223344556677",
        "x/generations/000003.json",
        "generations/000003.start.json.json",
    ],
)
def test_a_name_that_is_not_exactly_a_claims_is_none(name: str) -> None:
    assert parse_claim(name) is None
    assert parse_start(name) is None


def test_claims_and_start_records_are_not_mistaken_for_each_other() -> None:
    assert parse_claim(start_name(3)) is None
    assert parse_start(claim_name(3)) is None


@pytest.mark.parametrize("folder", [".tmp-step-000000000100-g000000-a", ".tmp-step-000000000100-g000003-A", ".tmp-x"])
def test_a_temporary_folder_of_somebody_else_is_none(folder: str) -> None:
    assert parse_temp(folder) is None


@pytest.mark.parametrize(
    "file",
    [
        "manifest.json",
        "tombstone.json",
        "../a-p0000.json",
        "a/b-p0000.json",
        "a-p000.json",
        "a-r00000-0000.bin",
        "",
        "a",
    ],
)
def test_only_parts_and_segments_may_be_written(file: str) -> None:
    with pytest.raises(ConfigError, match="no name for a file"):
        check_file(file)


def test_a_manifest_leads_to_segments_of_this_store_only() -> None:
    ref = StepRef(20, 2)
    segment = segment_name("a", 0, 0)
    assert resolve(ref, segment) == f"{ref.folder}/{segment}"
    assert resolve(ref, f"{StepRef(10, 1).folder}/{segment}") == f"{StepRef(10, 1).folder}/{segment}"
    for bad in (
        f"../{segment}",
        f"/{segment}",
        f"x/{segment}",
        f"a/../{segment}",
        "a-p0000.json",
        "/etc/passwd",
        "",
        f"./{segment}",
    ):
        with pytest.raises(CheckpointError, match="which no segment is called"):
            resolve(ref, bad)


def test_steps_and_generations_have_lower_bounds() -> None:
    assert StepRef(0, 1).folder == "step-000000000000-g000001"
    for step, generation in ((-1, 1), (0, 0)):
        with pytest.raises(ConfigError, match="cannot be"):
            StepRef(step, generation)


def test_references_sort_by_step_then_generation() -> None:
    assert sorted([StepRef(2, 1), StepRef(1, 2), StepRef(1, 1)]) == [StepRef(1, 1), StepRef(1, 2), StepRef(2, 1)]
