"""What is written is an archive of ``torch.save``, whoever reads it; and of the other's archives any part is read."""

import io
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from olmoe_lightning.checkpoint.chunks import read_chunk, write_chunk
from olmoe_lightning.checkpoint.directory import Range, load, save

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
          torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip


def values_of(dtype):
    return torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(20).to(dtype)[3:700]


def bits(values):
    return values.view(torch.uint8)


@pytest.fixture
def written(tmp_path):
    """Writes something behind other bytes; says to which path, from which byte on, and how long it is."""

    def write(values, by=write_chunk):
        with (tmp_path / "file").open("w+b", buffering=0) as file:
            file.write(b"something else")
            begin = file.tell()
            by(file, values)
            end = file.tell()
            write_chunk(file, torch.zeros(5))
        return tmp_path / "file", begin, end - begin

    return write


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_what_is_written(written, dtype):
    path, begin, length = written(values_of(dtype))
    archive = path.read_bytes()[begin : begin + length]
    found = torch.load(io.BytesIO(archive), weights_only=True)
    assert found.dtype == dtype
    assert torch.equal(bits(found), bits(values_of(dtype)))
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None  # its check sums hold
    assert length < values_of(dtype).nbytes + 2000


@pytest.mark.parametrize(
    "by", [write_chunk, lambda file, values: torch.save(values.clone(), file)], ids=["own", "torch"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_is_read_into_its_place(written, dtype, by):
    path, begin, length = written(values_of(dtype), by)
    whole = torch.zeros(102, dtype=dtype)
    with path.open("rb", buffering=0) as file:
        assert read_chunk(file, begin, length, 697, dtype, 50, whole[1:101])
    assert torch.equal(bits(whole[1:101]), bits(values_of(dtype)[50:150]))
    assert not bits(whole[:1]).any()
    assert not bits(whole[101:]).any()


def test_large_ranges_are_written_in_pieces(written):
    values = torch.arange(3 * 2**20, dtype=torch.float32)  # three pieces
    path, begin, length = written(values)
    assert torch.equal(torch.load(io.BytesIO(path.read_bytes()[begin:][:length]), weights_only=True), values)


def test_what_is_of_another_size_or_packed_is_left_to_torch(written):
    path, begin, length = written(values_of(torch.float32))
    with path.open("rb", buffering=0) as file:
        assert not read_chunk(file, begin, length, 698, torch.float32, 0, torch.zeros(10))
        assert not read_chunk(file, begin, length - 600, 697, torch.float32, 0, torch.zeros(10))

    def packed(file, values):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/0", values.numpy().tobytes())

    path, begin, length = written(values_of(torch.float32), packed)
    with path.open("rb", buffering=0) as file:
        assert not read_chunk(file, begin, length, 697, torch.float32, 0, torch.zeros(10))


def test_torch_reads_a_directory_with_its_own_reader(tmp_path):
    values = values_of(torch.bfloat16)
    save(tmp_path / "d", [Range("a", 697, 0, values[:300]), Range("a", 697, 300, values[300:])])
    found = {"a": torch.zeros(697, dtype=torch.bfloat16)}
    dcp.load(found, checkpoint_id=tmp_path / "d", no_dist=True)
    assert torch.equal(found["a"], values)


def test_a_directory_of_torch_is_read(tmp_path):
    values = values_of(torch.float32).clone()
    dcp.save({"a": values}, checkpoint_id=tmp_path / "d", no_dist=True)
    found = torch.zeros(100)
    load(tmp_path / "d", [Range("a", 697, 500, found)])
    assert torch.equal(found, values[500:600])
