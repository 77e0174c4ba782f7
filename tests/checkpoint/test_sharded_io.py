"""Ranges of flattened tensors in a directory: any ranges may be written, any others read."""

import pytest
import torch

from olmoe_lightning.checkpoint.directory import (
    CorruptCheckpoint,
    Range,
    WriteError,
    differences,
    index_of,
    load,
    read_range,
    save,
)

A, B = torch.arange(100, dtype=torch.float32), torch.arange(7)


def range_of(values, start, stop, name="a"):
    return Range(name, len(values), start, values[start:stop])


@pytest.fixture
def directory(tmp_path):
    save(tmp_path / "d", [range_of(A, 60, 100), range_of(A, 0, 60), range_of(B, 0, 7, "b")])
    return tmp_path / "d"


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (59, 61), (30, 80), (99, 100), (60, 60)])
def test_any_range_can_be_read(directory, start, stop):
    assert torch.equal(read_range(directory, "a", start, stop), A[start:stop])


def test_values_are_cast_to_what_they_are_read_into(directory):
    values = torch.zeros(40, dtype=torch.bfloat16)
    load(directory, [Range("a", 100, 60, values)])
    assert torch.equal(values, A[60:].bfloat16())


def test_other_tensors_are_left_alone(directory):
    whole = torch.full((100,), -1.0)
    load(directory, [Range("a", 100, 10, whole[10:20])])
    assert torch.equal(whole[10:20], A[10:20])
    assert (whole[:10] == -1).all()
    assert (whole[20:] == -1).all()


def test_a_part_of_a_large_storage_takes_no_more_bytes_than_it_has(tmp_path):
    large = torch.zeros(1_000_000)
    save(tmp_path / "d", [Range("part", 10, 0, large[5:15])])
    assert sum(file.stat().st_size for file in (tmp_path / "d").iterdir()) < 10_000


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 60)], "elements 60 to 100 have no writer"),
        ([(0, 50), (60, 100)], "elements 50 to 60 have no writer"),
        ([(0, 60), (50, 100)], "elements 50 to 60 have two writers"),
    ],
)
def test_each_element_needs_one_writer(tmp_path, parts, message):
    with pytest.raises(WriteError, match=message):
        save(tmp_path / "d", [range_of(A, *part) for part in parts])
    assert not (tmp_path / "d" / ".metadata").exists()


def write_in_two(directory, overlap):
    """Each rank its own range of one tensor, and both all of another."""
    rank = torch.distributed.get_rank()
    own = (0, 60) if rank == 0 else (60 - overlap, 100)
    try:
        save(directory, [range_of(A, *own), range_of(B, 0, 7, "b")], torch.distributed.group.WORLD)
    except WriteError as error:
        return str(error)
    values = torch.zeros(50)
    load(directory, [Range("a", 100, 25 * (1 + rank), values)], torch.distributed.group.WORLD)
    return torch.equal(values, A[25 * (1 + rank) :][:50])


def test_two_processes_write_and_read_at_once(workers, tmp_path):
    assert workers(2).run(write_in_two, tmp_path / "d", 0) == [True, True]
    assert len(index_of(tmp_path / "d")["b"].chunks) == 1


def test_all_processes_say_what_kept_one_from_writing(workers, tmp_path):
    for message in workers(2).run(write_in_two, tmp_path / "d", 3):
        assert "a: elements 57 to 60 have two writers" in message


def test_a_range_must_lie_within_its_tensor():
    with pytest.raises(ValueError, match="elements 95 to 105 are not within 100"):
        Range("a", 100, 95, torch.zeros(10))
    with pytest.raises(ValueError, match="flat and contiguous"):
        Range("a", 100, 0, torch.zeros(2, 5))


@pytest.mark.parametrize("damage", ["gone", "cut", "index gone", "index cut", "index of another kind"])
def test_damage_is_told_in_a_sentence(directory, damage):
    data, index = next(directory.glob("*.distcp")), directory / ".metadata"
    if damage == "gone":
        data.unlink()
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:200])
    elif damage == "index gone":
        index.unlink()
    elif damage == "index cut":
        index.write_bytes(index.read_bytes()[:100])
    else:
        index.write_bytes(b"no index at all")
    with pytest.raises(CorruptCheckpoint, match=r"damaged|no sharded checkpoint"):
        read_range(directory, "a", 0, 100)


def test_every_difference_is_listed():
    wanted, there = {"a": [2, 3], "b": [4], "c": [5]}, {"a": [3, 2], "b": [4], "d": [6]}
    assert differences(wanted, there) == ["missing: c", "unexpected: d", "a is [3, 2] there, [2, 3] here"]
    assert differences(wanted, there, strict=False) == ["a is [3, 2] there, [2, 3] here"]
    assert differences(wanted, wanted) == []
