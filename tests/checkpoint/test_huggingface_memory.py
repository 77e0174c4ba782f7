"""A conversion takes the memory of a few blocks, whatever the checkpoint and its shards weigh.

Measured in a process of its own, against what it had after its imports, sampled every 2 ms:
- RssAnon, memory that the process itself holds and that cannot be dropped;
- VmRSS, which also counts the pages of mapped files, here of one shard that is as large as the checkpoint.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from olmoe_lightning.checkpoint.foreign.hf_config import config_to_hf
from olmoe_lightning.checkpoint.foreign.hf_layout import hf_tensors
from olmoe_lightning.config import ModelConfig

SHARDS = 6
CONFIG = ModelConfig(
    vocab_size=2048,
    d_model=512,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    num_experts=8,
    top_k=2,
    expert_hidden=1024,
)

MEASURE = """
import json, sys, threading, time
from olmoe_lightning.checkpoint import convert, read

def status():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS")}

def sample():
    while not done.is_set():
        for name, value in status().items():
            peak[name] = max(peak[name], value)
        time.sleep(0.002)

for arguments in map(json.loads, sys.argv[1:]):
    before = status()
    peak = dict(before)
    done = threading.Event()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    result = (read if "directory" in arguments else convert)(**arguments)
    done.set()
    thread.join()
    print(json.dumps({name: peak[name] - before[name] for name in before}))
"""


def write_sparse_checkpoint(directory: Path) -> int:
    """A Hugging Face checkpoint of zeros in files with holes; returns its bytes."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    tensors = {tensor.name: tensor.shape for parts in hf_tensors(CONFIG).values() for tensor in parts}
    names = sorted(tensors)
    weight_map = {}
    total = 0
    for i in range(SHARDS):
        file = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, end = {}, 0
        for name in names[i * len(names) // SHARDS : (i + 1) * len(names) // SHARDS]:
            begin, end = end, end + 4 * math.prod(tensors[name])
            header[name] = {"dtype": "F32", "shape": tensors[name], "data_offsets": [begin, end]}
            weight_map[name] = file
        encoded = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(len(encoded).to_bytes(8, "little") + encoded)
            handle.truncate(8 + len(encoded) + end)
        total += end
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def measure(*calls: dict[str, str]) -> list[dict[str, int]]:
    command = [sys.executable, "-c", MEASURE, *map(json.dumps, calls)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has")
def test_peak_memory_is_far_below_the_checkpoint(tmp_path):
    total = write_sparse_checkpoint(tmp_path / "hf")
    assert total > 300e6
    shard = total / SHARDS
    hf, native, again = (str(tmp_path / name) for name in ("hf", "native", "again"))
    *conversions, in_memory = measure(
        {"from_hf": hf, "to_native": native},  # six shards to one
        {"from_native": native, "to_hf": again, "dtype": "bfloat16"},
        {"directory": hf},
    )
    assert in_memory["RssAnon"] > 0.9 * total  # negative control: reading it all is seen
    for grown in conversions:
        # Own memory: one block when it is cast (8 MB are seen), next to nothing when mapped pages are written as they
        # are. What the allocator keeps differs from machine to machine; no shard is ever in memory.
        assert grown["RssAnon"] < shard, grown
        # With the mapping that is renewed every 64 MiB, and a block of at most 32 MiB beyond it: 80 MB are seen, and
        # the mapping of a file that is as large as the checkpoint would be seen as such.
        assert grown["VmRSS"] < total / 2, grown
