"""Expanded, strided and shared memory of a module: two processes end with the values of one."""

import pytest
import torch
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    numbered,
    own_batches,
    quiet,
    rank_and_size,
    state_of,
    trained_alone,
)
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.meta import load_sharded, read_meta
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.layout import distinct, write


def expanded_buffer(module):
    module.register_buffer("mask", torch.full((1,), 0.5).expand(4096))


def expanded_frozen(module):
    module.scale = nn.Parameter(torch.full((1, 1), 0.5).expand(64, 64), requires_grad=False)


def views_of_one_tensor(module):
    whole = torch.arange(24.0).view(4, 6)
    module.register_buffer("columns", whole[:, 1:3])
    module.register_buffer("transposed", whole.t())
    module.register_buffer("strided", whole.view(-1)[::5])


def windows(module):
    module.register_buffer("windows", torch.arange(10.0).unfold(0, 4, 1))


def empty(module):
    module.register_buffer("nothing", torch.zeros(3, 0))
    module.register_buffer("nothing_expanded", torch.zeros(0, 1).expand(0, 4))


def packed_weights(module):
    """Two parameters in one storage, beside each other."""
    packed = torch.randn(40, 20, generator=torch.Generator().manual_seed(3)) * 0.1
    module.blocks[0].weight = nn.Parameter(packed[:20])
    module.blocks[2].weight = nn.Parameter(packed[20:])


def interleaved_weights(module):
    packed = torch.randn(20, 40, generator=torch.Generator().manual_seed(3)) * 0.1
    module.blocks[0].weight = nn.Parameter(packed[:, ::2])
    module.blocks[2].weight = nn.Parameter(packed[:, 1::2])


def view_of_a_weight(module):
    module.register_buffer("first_row", module.blocks[0].weight.data[0])
    module.watched = nn.Parameter(module.last.weight.data.t(), requires_grad=False)


def channels_last(module):
    torch.manual_seed(5)
    module.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)


def convolved(module, x, number):
    images = x.view(4, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    return module.loss(x) + module.conv(images).square().mean()


def uses_buffers(module, x, number):
    return module.loss(x) + sum(buffer.sum() for buffer in module.buffers()) * module.last.weight.mean() * 1e-2


KINDS = {
    "an expanded buffer": (expanded_buffer, uses_buffers),
    "an expanded frozen parameter": (expanded_frozen, None),
    "buffers as views of one tensor": (views_of_one_tensor, uses_buffers),
    "overlapping windows": (windows, uses_buffers),
    "buffers without elements": (empty, None),
    "weights in one storage": (packed_weights, None),
    "weights in alternate columns of one storage": (interleaved_weights, None),
    "a buffer that is a row of a weight": (view_of_a_weight, uses_buffers),
    "channels_last weights": (channels_last, convolved),
}


def module_of(kind, spoilt=False):
    change, step = KINDS[kind]
    module = Dense(change=change, step=step)
    if spoilt and rank_and_size()[0] == 1:  # the other process' values must not count
        for tensor in (*module.parameters(), *module.buffers()):
            distinct(tensor.data).fill_(9.0)
    return module


def train(kind, path):
    trainer = quiet(MoEStrategy(bucket_megabytes=SMALL_BUCKETS))
    module = module_of(kind, spoilt=True)
    trainer.fit(module, own_batches(numbered(8)))
    trainer.save_checkpoint(path)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return state_of(trainer), buffers


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_lightnings_single_device_whatever_the_layout(workers, tmp_path, kind):
    (ours, first), (_, second) = workers(2).run(train, kind, tmp_path / "saved.ckpt")
    alone = trained_alone(module_of(kind), numbered(8))
    torch.testing.assert_close(ours, alone, **CLOSE)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    again = module_of(kind)
    for tensor in (*again.parameters(), *again.buffers()):
        distinct(tensor.data).fill_(9.0)
    load_sharded(again, read_meta(tmp_path / "saved.ckpt"))
    torch.testing.assert_close(dict(again.state_dict()), ours, rtol=0, atol=0)


def resume(kind, path):
    trainer = quiet(MoEStrategy(bucket_megabytes=SMALL_BUCKETS), max_epochs=2)
    module = module_of(kind)
    for tensor in (*module.parameters(), *module.buffers()):
        distinct(tensor.data).fill_(9.0)
    seen = []
    module.on_train_start = lambda: seen.append({n: v.clone() for n, v in module.state_dict().items()})
    trainer.fit(module, own_batches(numbered(8)), ckpt_path=path)
    return seen[0]


@pytest.mark.parametrize("kind", ["an expanded buffer", "buffers as views of one tensor", "channels_last weights"])
def test_a_run_goes_on_with_what_was_saved_whatever_the_layout(workers, tmp_path, kind):
    (ours, _), _ = workers(2).run(train, kind, tmp_path / "saved.ckpt")
    for found in workers(2).run(resume, kind, tmp_path / "saved.ckpt"):
        torch.testing.assert_close(found, ours, rtol=0, atol=0)


def overlapping(module):
    module.part = nn.Parameter(module.blocks[0].weight.data[:3])


def expanded_trained(module):
    module.gain = nn.Parameter(torch.ones(1).expand(20))


def wider_than_a_weight(module):
    packed = torch.zeros(40, 20)
    module.blocks[0].weight = nn.Parameter(packed[:20])
    module.register_buffer("packed", packed)


def refusal(change):
    try:
        quiet().fit(Dense(change=change), own_batches(numbered(2)))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (overlapping, ("part", "blocks.0.weight", "elements in common")),
        (expanded_trained, ("gain", "expanded")),
        (wider_than_a_weight, ("packed", "blocks.0.weight", "clone it")),
    ],
)
def test_memory_that_processes_cannot_update_together_is_refused_with_its_names(workers, change, words):
    for message in workers(2).run(refusal, change):
        assert all(word in message for word in words), message


def test_writing_reaches_every_element_once():
    target = torch.zeros(2, 1).expand(2, 3)
    write(target, torch.tensor([[1.0], [2.0]]).expand(2, 3))
    assert target.tolist() == [[1.0] * 3, [2.0] * 3]
    assert distinct(target).shape == (2, 1)
