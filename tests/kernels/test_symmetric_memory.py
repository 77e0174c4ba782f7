"""Memory that processes share: what one writes the others see after they have met, and nothing is left behind."""

import datetime
import os
import signal
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.kernels.cpu import native
from olmoe_lightning.kernels.memory import posix as posix_memory
from olmoe_lightning.kernels.memory.posix import PosixMemory
from olmoe_lightning.kernels.memory.symmetric import PeerError
from olmoe_lightning.kernels.memory.virtual import VirtualRanks
from olmoe_lightning.tools.processes import WorkerError


@pytest.fixture(params=["words", "group"])
def barrier(request):
    """What the barrier is made of: words of shared memory, or the process group when nothing can be compiled."""
    return request.param


def make(barrier="words", timeout=None):
    reason = "no compiler" if barrier == "group" and dist.get_rank() == 0 else native.unavailable_reason()
    with mock.patch.object(posix_memory, "unavailable_reason", return_value=reason):
        return PosixMemory(dist.group.WORLD, timeout)


def write_to_all(memory, turns=50):
    """Each process writes its number and the turn into a place of its own in every other's memory, turn after turn."""
    region = memory.allocate(8 * 64 * memory.size)
    for turn in range(turns):
        for peer in range(memory.size):
            region.peer(peer, (memory.size, 64), torch.int64)[memory.rank] = 1000 * turn + memory.rank
        numbers = memory.exchange([turn, -memory.rank])
        assert numbers == [(turn, -rank) for rank in range(memory.size)]
        found = region.peer(memory.rank, (memory.size, 64), torch.int64)
        assert torch.equal(found, (1000 * turn + torch.arange(memory.size))[:, None].expand(-1, 64))
        memory.exchange()  # no process writes the next before all have read this
    return memory.rank


def write_in_processes(barrier):
    memory = make(barrier)
    rank = write_to_all(memory)
    memory.close()
    memory.close()
    return rank


@pytest.mark.parametrize("size", [2, 4])
def test_what_was_written_before_a_barrier_is_seen_after_it(workers, size, barrier):
    assert workers(size).run(write_in_processes, barrier) == list(range(size))


def test_virtual_ranks_are_threads_that_behave_alike():
    ranks, seen = VirtualRanks(3), []
    threads = [threading.Thread(target=lambda r=r: seen.append(write_to_all(ranks.memory(r)))) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(seen) == [0, 1, 2]


def test_a_virtual_rank_that_does_not_come_is_named():
    with pytest.raises(PeerError, match=r"virtual rank 1 of 3 waited 0.01 s in vain for ranks \[0, 2\]"):
        VirtualRanks(3, timeout=0.01).memory(1).exchange()


def many_barriers(count):
    """Barriers after which all numbers of that exchange had arrived."""
    complete = 0
    memory = make()
    region = memory.allocate(4096)
    cells = [region.peer(peer, (memory.size,), torch.int64) for peer in range(memory.size)]
    for turn in range(count):
        for cell in cells:
            cell[memory.rank] = turn
        memory.exchange()
        complete += cells[memory.rank].tolist() == [turn] * memory.size
        memory.exchange()
    return complete


def test_thousands_of_barriers_lose_nothing(workers):
    assert workers(2).run(many_barriers, 3000) == [3000, 3000]


def wait_alone(timeout):
    memory = make(timeout=timeout)
    if memory.rank == 1:
        with pytest.raises(PeerError) as caught:
            memory.exchange()
        answer = str(caught.value)
    else:
        answer = os.getpid()
    dist.barrier()
    return answer


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="the barrier with a limit of its own is compiled")
def test_a_process_that_does_not_come_is_named(workers):
    pid, text = workers(2).run(wait_alone, 0.3)
    assert text == f"rank 0 of 2 (process {pid}) did not come within 0 s"


def die(barrier):
    memory = make(barrier)
    memory.allocate(1 << 20).peer(memory.rank, (1 << 17,), torch.int64).fill_(7)
    memory.exchange()
    if memory.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    memory.exchange()


def test_memory_of_a_killed_process_is_gone_and_the_others_are_told(workers, barrier):
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(WorkerError) as caught:
        workers(2).run(die, barrier)
    assert "exit code -9" in str(caught.value)
    assert "PeerError: rank 0 of 2 (process" in str(caught.value)
    assert ") has ended" in str(caught.value)
    assert set(os.listdir("/dev/shm")) <= before


def files_of_memory():
    memory = make()
    memory.allocate(1 << 20)
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.lexists(path)]


def test_the_memory_has_no_name_in_any_folder(workers):
    for names in workers(2).run(files_of_memory):
        names = [name for name in names if "olmoe-lightning" in name]
        assert names
        assert all(name.startswith("/memfd:") and name.endswith("(deleted)") for name in names)


def outlive():
    memory = make()
    region = memory.allocate(1 << 16)
    mine = region.peer(memory.rank, (100,), torch.float32)
    theirs = region.peer(1 - memory.rank, (100,), torch.float32)
    mine.fill_(memory.rank)
    memory.exchange()
    del region, mine
    memory.exchange()
    memory.close()
    return theirs.tolist()


def test_tensors_outlive_their_region_and_its_owner_s_use_of_it(workers):
    assert workers(2).run(outlive) == [[1.0] * 100, [0.0] * 100]


def refused():
    def cannot(pid, fd, nbytes):
        raise FileNotFoundError(2, "No such file", f"/proc/{pid}/fd/{fd}")

    real = posix_memory._map if dist.get_rank() == 0 else cannot
    with mock.patch.object(posix_memory, "_map", real), pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def test_processes_that_cannot_map_each_other_are_all_told_what_to_take(workers):
    texts = workers(2).run(refused)
    assert texts[0] == texts[1]
    assert "rank 1 cannot open the memory of rank 0" in texts[0]
    assert "'all_to_all'" in texts[0]
    assert "'deepep'" in texts[0]


def timeout_of_a_group():
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=17))
    memory = PosixMemory(group)
    return memory.timeout


def test_a_wait_is_as_long_as_the_group_s(workers):
    assert workers(2).run(timeout_of_a_group) == [17, 17]


def test_a_tensor_that_does_not_fit_is_refused_with_the_numbers():
    region = VirtualRanks(1).memory(0).allocate(100)
    assert len(region.peer(0, (25,), torch.float32)) == 25
    with pytest.raises(ValueError, match=r"\[26\] of torch.float32 at byte 0 takes 104 bytes .* 100 bytes"):
        region.peer(0, (26,), torch.float32)
    with pytest.raises(ValueError, match=r"at byte 2 .* not aligned to 4"):
        region.peer(0, (1,), torch.float32, offset=2)


def test_the_interface_of_cuda_can_be_imported():
    from olmoe_lightning.kernels.memory.cuda import CudaMemory
    from olmoe_lightning.kernels.memory.symmetric import SymmetricMemory

    assert issubclass(CudaMemory, SymmetricMemory)
