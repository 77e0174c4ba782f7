"""Groups of an optimizer are known by their place, whatever a process has of them and whatever they are called."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_any_topology import CONFIG, Model, processes
from test_odd_state import Plain, data, fitted, trainer
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.meta import KEY, META, read_meta
from olmoe_lightning.errors import UserError


class FrozenExperts(Model):
    def configure_model(self):
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".experts." not in name)


MODELS = {
    "all decay": lambda: Model(CONFIG, learning_rate=0.01, schedule_steps=8, decay_all=True, expert_lr_multiplier=0.5),
    "all dense": lambda: Model(CONFIG.replace(num_dense_layers=5), learning_rate=0.01, schedule_steps=8),
    "frozen experts": lambda: FrozenExperts(CONFIG, learning_rate=0.01, schedule_steps=8),
}
MESHES = {"1x1x1": {}, "2x1x1": {"pipeline_parallel_size": 2}, "1x1x2": {"expert_parallel_size": 2}}


class Watch(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, *_):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def train(model, mesh, kind, epochs, path=None, ckpt_path=None):
    watch = Watch()
    run = Trainer(
        accelerator="cpu",
        devices=processes(mesh),
        strategy=MoEStrategy(state_dict_type=kind, **MESHES[mesh]),
        max_epochs=epochs,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    run.fit(MODELS[model](), ckpt_path=ckpt_path)
    if path:
        run.save_checkpoint(path)
    groups = run.optimizers[0].param_groups
    return watch.losses, [(group["name"], group["lr"], group["weight_decay"]) for group in groups]


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_groups_without_parameters_are_groups_on_every_topology(model, kind, workers, tmp_path):
    whole, groups = train(model, "1x1x1", kind, 2)
    for start in MESHES:
        path = str(tmp_path / f"{start}.ckpt")
        (first, _), *_ = workers(processes(start)).run(train, model, start, kind, 1, path)
        for end in MESHES if start == "1x1x1" else ["1x1x1"]:
            for rest, groups_here in workers(processes(end)).run(train, model, end, kind, 2, None, path):
                assert first + rest == pytest.approx(whole, rel=2e-5)
                assert groups_here == groups


def three_groups(names, rates=(0.1, 0.2, 0.3), kind=torch.optim.AdamW):
    """Of the weight, of nothing, of the bias."""

    def make(module):
        members = [module.layer.weight], [], [module.layer.bias]
        groups = [{"params": each, "lr": rate} for each, rate in zip(members, rates, strict=True)]
        for group, name in zip(groups, names, strict=True):
            group |= {} if name is None else {"name": name}
        return kind(groups)

    return make


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("names", [("a", "a", "a"), (None, "0", None), ("2", None, "0"), (None, None, None)])
def test_what_groups_are_called_does_not_matter(names, kind, tmp_path):
    rates = (0.1, 0.2, 0.3)
    fitted(tmp_path / "a.ckpt", Plain(optimizer=three_groups(names, rates)), state_dict_type=kind)
    run = trainer(max_epochs=2, state_dict_type=kind)
    run.fit(Plain(optimizer=three_groups(names, (1.0, 1.0, 1.0))), data(), ckpt_path=tmp_path / "a.ckpt")
    assert [group["lr"] for group in run.optimizers[0].param_groups] == list(rates)


def test_a_directory_of_the_first_format_finds_its_groups_by_name(tmp_path):
    names = ("weight", "nothing", "bias")
    fitted(tmp_path / "a.ckpt", Plain(optimizer=three_groups(names)))
    meta = torch.load(tmp_path / "a.ckpt" / META, weights_only=True)
    entry = meta[KEY]
    entry |= {"format": 1, "group_of": {n: entry["param_groups"][g]["name"] for n, g in entry["group_of"].items()}}
    del entry["param_groups"][1], entry["optimizer"]  # it left out what was empty
    torch.save(meta, tmp_path / "a.ckpt" / META)
    run = trainer(max_epochs=2)
    run.fit(Plain(optimizer=three_groups(names, (1.0, 0.5, 1.0))), data(), ckpt_path=tmp_path / "a.ckpt")
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1, 0.5, 0.3]


def test_a_file_of_plain_lightning_without_the_empty_group_loads(tmp_path):
    def two(module):
        return torch.optim.AdamW(
            [{"params": [p], "lr": rate} for p, rate in zip(module.layer.parameters(), (0.1, 0.3), strict=True)]
        )

    plain = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    plain.fit(Plain(optimizer=two), data())
    plain.save_checkpoint(tmp_path / "a.ckpt")
    run = trainer(max_epochs=2)
    run.fit(Plain(optimizer=three_groups((None,) * 3, (1.0, 0.5, 1.0))), data(), ckpt_path=tmp_path / "a.ckpt")
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1, 0.5, 0.3]


def test_groups_that_were_split_or_joined_are_refused(tmp_path):
    fitted(tmp_path / "a.ckpt", Plain())
    with pytest.raises(UserError, match="1 parameter groups, of which 1 have parameters, and this one has 3"):
        trainer(max_epochs=2).fit(Plain(optimizer=three_groups((None,) * 3)), data(), ckpt_path=tmp_path / "a.ckpt")


def ranks_disagree(what):
    def make(module):
        rank = module.trainer.global_rank
        groups = [{"params": [parameter], "lr": 0.1} for parameter in module.layer.parameters()]
        if what == "number" and rank:
            groups.append({"params": []})
        if what == "options" and rank:
            groups[1]["lr"] = 0.2
        return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(UserError) as caught:
        trainer(devices=2).fit(Plain(optimizer=make), DataLoader([torch.ones(2, 4)] * 2, batch_size=None))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("number", "made 2 parameter groups on rank 0 and 3 on rank 1"),
        ("options", "parameter group 1 has lr=0.1 on rank 0 and 0.2 on rank 1"),
    ],
)
def test_processes_that_make_other_groups_are_refused(what, sentence, workers):
    for message in workers(2).run(ranks_disagree, what):
        assert sentence in message


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_another_optimizer_than_that_of_the_checkpoint_is_refused_with_both(kind, tmp_path):
    fitted(tmp_path / "a.ckpt", Plain(), state_dict_type=kind)
    sgd = Plain(optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(UserError, match=r"state of the optimizer AdamW, which says nothing to SGD; .*start anew"):
        trainer(max_epochs=2).fit(sgd, data(), ckpt_path=tmp_path / "a.ckpt")
    meta = read_meta(tmp_path / "a.ckpt") if kind == "sharded" else None
    assert meta is None or meta[KEY]["optimizer"] == "AdamW"
