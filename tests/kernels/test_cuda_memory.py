"""Memory of GPUs, as far as it can be shown without one: who reaches whom, and how long memory lives."""

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.kernels.memory import cuda as cuda_memory
from olmoe_lightning.kernels.memory.cuda import DeviceRegion, VirtualDeviceMemory, _Place, unreachable
from olmoe_lightning.kernels.memory.virtual import VirtualRanks
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommSpec, RowwiseComm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ([_Place("a", 0, ALL, None), _Place("a", 2, ALL, None)], None),
        ([_Place("a", 0, ALL, "x/1"), _Place("b", 0, ALL, "x/1")], None),
        (
            [_Place("b", 0, ALL, None), _Place("a", 0, ALL, None)],
            "the GPUs are on hosts a, b, which one NVLink domain does not span",
        ),
        (
            [_Place("a", 0, ALL, "x/1"), _Place("b", 0, ALL, "x/2")],
            "the GPUs are on hosts a, b, which one NVLink domain does not span",
        ),
        (
            [_Place("a", 0, (0,), None), _Place("a", 0, (0,), None)],
            "ranks 0 and 1 both call their GPU cuda:0 on host a; each needs one of its own, and a number for it that "
            "all agree on: let all see the same CUDA_VISIBLE_DEVICES",
        ),
        (
            [_Place("a", 0, (0, 1), None), _Place("a", 1, (1,), None)],
            "rank 1 (cuda:1) has no direct access to the memory of rank 0 (cuda:0) on host a",
        ),
        (
            [_Place("a", 0, ALL, None), "rank 1 cannot use its GPU: out of order"],
            "rank 1 cannot use its GPU: out of order",
        ),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_named(places, problem):
    assert unreachable(places) == problem


def set_up_from_two_hosts():
    """What each of two processes is told whose hosts no NVLink connects."""
    here = _Place(f"host{dist.get_rank()}", 0, (0,), None)
    with mock.patch.object(cuda_memory, "_place", return_value=here), pytest.raises(ValueError) as caught:
        cuda_memory.CudaMemory(dist.group.WORLD, CUDA, timeout=20)
    return str(caught.value)


def test_all_processes_are_told_what_to_take_instead(workers):
    texts = workers(2).run(set_up_from_two_hosts)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "the GPUs are on hosts host0, host1, which one NVLink domain does not span: it needs GPUs"
    )
    assert "take 'all_to_all'" in texts[0]
    assert "'deepep'" in texts[0]


def set_up_without_a_gpu():
    with pytest.raises(ValueError) as caught:
        cuda_memory.CudaMemory(dist.group.WORLD, torch.device("cuda", dist.get_rank()), timeout=20)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_processes_without_a_gpu_are_told_so(workers):
    texts = workers(2).run(set_up_without_a_gpu)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 0 cannot use its GPU cuda:0: this process sees 0 GPUs: it needs GPUs that address")


def set_up_where_one_cannot_map():
    here = _Place("host", dist.get_rank(), (0, 1), None)

    class OneFails(cuda_memory.CudaMemory):
        def _make(self, nbytes):
            if self.rank == 1:
                raise RuntimeError("CUDA driver error: invalid device ordinal")

    with mock.patch.object(cuda_memory, "_place", return_value=here), pytest.raises(ValueError) as caught:
        OneFails(dist.group.WORLD, CUDA, timeout=20)
    return str(caught.value)


def test_a_process_that_cannot_map_the_others_stops_all_of_them(workers):
    texts = workers(2).run(set_up_where_one_cannot_map)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 cannot map the memory of the other GPUs: CUDA driver error: invalid device")


@pytest.mark.skipif(cuda_memory.cuda_memory_missing() is None, reason="this build of torch has it")
def test_a_build_without_symmetric_memory_is_told_so():
    assert "was built without symmetric memory for CUDA" in cuda_memory.cuda_memory_missing()
    with pytest.raises(ValueError, match=r"cannot serve axis 'expert', rank 0 of 2: torch .* was built without symm"):
        RowwiseComm().setup(Axis("expert", (0, 1), 0), CommSpec(4, 2, 8, torch.float32, CUDA))


# ------------------------------------------------------------------------------------------------- how long it lives


def test_a_storage_is_released_when_its_last_tensor_is_gone_and_not_before():
    parts = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    region, released = DeviceRegion(parts, 64), []
    first = region.storage(1, lambda: released.append("first"))
    second = region.storage(1, lambda: released.append("second"))
    first.fill_(7)
    assert second.tolist() == parts[1].tolist() == [7] * 64  # the same memory
    row = first[32:].view(torch.float32)
    del first
    x = torch.ones(8, requires_grad=True)
    y = x * row
    del row
    gc.collect()
    assert released == []  # saved for the backward pass
    y.sum().backward()
    del y
    gc.collect()
    assert released == ["first"]
    del second
    assert released == ["first", "second"]


def test_memory_lives_as_long_as_a_tensor_of_it():
    class Handle:
        pass

    handle = Handle()
    gone = weakref.ref(handle)
    region = DeviceRegion([torch.zeros(64, dtype=torch.uint8)], 64, keep=handle)
    tensor = region.peer(0, (4,), torch.float32, offset=16)
    del region, handle
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_memory_made_in_inference_mode_serves_training_too():
    memory = VirtualDeviceMemory(VirtualRanks(1), 0, CPU)
    with torch.inference_mode():
        region = memory.allocate(64)
        region.storage(0).fill_(1)
    tensor = region.peer(0, (16,), torch.float32)
    assert not tensor.is_inference()
    tensor.fill_(2)
    (torch.ones(16, requires_grad=True) * tensor).sum().backward()


def test_virtual_ranks_on_one_device_see_what_the_others_wrote():
    ranks, seen = VirtualRanks(3, timeout=20), {}

    def run(rank):
        memory = VirtualDeviceMemory(ranks, rank, CPU)
        region = memory.allocate(4 * 3)
        for peer in range(3):
            region.peer(peer, (3,), torch.float32)[rank] = 10 * rank + peer
        memory.exchange()
        seen[rank] = region.peer(rank, (3,), torch.float32).tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {rank: [rank, 10 + rank, 20 + rank] for rank in range(3)}


def test_rows_are_leased_in_memory_of_a_device_too():
    comm = RowwiseComm()
    comm.setup_on(
        VirtualDeviceMemory(VirtualRanks(1), 0, CPU), Axis("expert", (0,), 0), CommSpec(4, 2, 8, torch.float32, CPU)
    )
    x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    for _ in range(2):
        sent = comm.dispatch(x, torch.tensor([[0, 1], [3, 2], [2, 0], [1, 3], [0, 2]]), weights)
        y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle)
        # two products and a sum of fp32 numbers of order one
        torch.testing.assert_close(y, weights.sum(1, keepdim=True) * x, rtol=1e-5, atol=1e-6)
        del sent
        assert comm.pool.in_use == 1
        y.sum().backward()
        del y
        assert comm.pool.in_use == 0
    assert len(comm.pool.regions) == 2
