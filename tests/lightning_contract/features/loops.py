"""Loops: how long, how often, and what ends them."""

import os
import signal

import torch
from contract import row
from laboratory import SEVERAL, Ordinary, metrics
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

GROUP = "Loops"


class Calls(Callback):
    """Names of hooks in the order in which they come."""

    def __init__(self, *names):
        self.seen = []
        for name in names:
            setattr(self, name, self._noting(name))

    def _noting(self, name):
        def note(*args, **kwargs):
            self.seen.append(name)

        return note


def batch_counter():
    return Calls("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end", "on_validation_end")


def counted(lab, **options):
    calls = batch_counter()
    return {"calls": calls.seen, **lab.fit(None, calls, **options)}


@row(GROUP, "two epochs with a validation each", quick=True)
def _(lab):
    return counted(lab, max_epochs=2, val=lab.loader(2, first=1))


@row(GROUP, "`max_steps`")
def _(lab):
    return counted(lab, max_epochs=-1, max_steps=6)


@row(GROUP, "`max_steps=0`")
def _(lab):
    return {"calls": (calls := counted(lab, max_steps=0))["calls"], "steps": calls["steps"]}


@row(GROUP, "`max_epochs=0`")
def _(lab):
    return {"steps": counted(lab, max_epochs=0)["steps"]}


@row(GROUP, "`max_time` that is over at once")
def _(lab):
    return counted(lab, max_epochs=5, max_time={"seconds": 0})


@row(GROUP, "`max_time` that is never over")
def _(lab):
    return counted(lab, max_time="01:00:00:00")


@row(GROUP, "`accumulate_grad_batches`", quick=True)
def _(lab):
    return counted(lab, accumulate_grad_batches=2)


class LastWindow(Ordinary):
    """The mean over the batches that there are, which plain Lightning divides by those that there might be."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output["loss"] * (2 if batch_idx == 4 else 1)


@row(
    GROUP,
    "the last, shorter window of accumulation",
    differs="divided by the batches that it has, not by `accumulate_grad_batches`",
)
def _(lab):
    module = LastWindow() if lab.plain else Ordinary()
    return lab.fit(module, train=lab.loader(5), accumulate_grad_batches=2)


@row(GROUP, "`limit_train_batches`, a number")
def _(lab):
    return counted(lab, limit_train_batches=3)


@row(GROUP, "`limit_train_batches`, a share")
def _(lab):
    return counted(lab, limit_train_batches=0.5)


@row(GROUP, "`limit_train_batches=0`")
def _(lab):
    return {"steps": counted(lab, limit_train_batches=0)["steps"]}


@row(GROUP, "`limit_val_batches`")
def _(lab):
    return counted(lab, limit_val_batches=1, val=lab.loader(3, first=1))


@row(GROUP, "`limit_val_batches=0`")
def _(lab):
    return counted(lab, limit_val_batches=0, val=lab.loader(3, first=1))


@row(GROUP, "`limit_test_batches`, `limit_predict_batches`")
def _(lab):
    trainer = lab.trainer(limit_test_batches=2, limit_predict_batches=1)
    (tested,) = trainer.test(module := Ordinary(), lab.loader(4), verbose=False)
    predicted = trainer.predict(module, lab.loader(4))
    return {"tested": tested, "predicted": [lab.everywhere(batch.float()) for batch in predicted]}


@row(GROUP, "`val_check_interval`, a share of an epoch")
def _(lab):
    return counted(lab, val_check_interval=0.5, val=lab.loader(1, first=1))


@row(GROUP, "`val_check_interval`, a number of batches")
def _(lab):
    return counted(lab, val_check_interval=2, max_epochs=2, val=lab.loader(1, first=1))


@row(GROUP, "`val_check_interval` over the ends of epochs")
def _(lab):
    return counted(lab, val_check_interval=3, check_val_every_n_epoch=None, max_epochs=2, val=lab.loader(1, first=1))


@row(GROUP, "`val_check_interval`, a time")
def _(lab):
    return counted(lab, val_check_interval="00:01:00:00", val=lab.loader(1, first=1))


@row(GROUP, "`check_val_every_n_epoch`")
def _(lab):
    return counted(lab, check_val_every_n_epoch=2, max_epochs=3, val=lab.loader(1, first=1))


@row(GROUP, "`num_sanity_val_steps`")
def _(lab):
    return counted(lab, num_sanity_val_steps=2, val=lab.loader(2, first=1))


@row(GROUP, "`num_sanity_val_steps=-1`")
def _(lab):
    return counted(lab, num_sanity_val_steps=-1, val=lab.loader(2, first=1))


@row(GROUP, "`overfit_batches`")
def _(lab):
    return counted(lab, overfit_batches=1, max_epochs=3)


@row(GROUP, "`fast_dev_run`")
def _(lab):
    return counted(lab, fast_dev_run=True, val=lab.loader(2, first=1))


@row(GROUP, "`fast_dev_run=2`")
def _(lab):
    return counted(lab, fast_dev_run=2, val=lab.loader(2, first=1))


class StopsItself(Ordinary):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = self.trainer.should_stop or batch_idx == 1


@row(GROUP, "`trainer.should_stop`")
def _(lab):
    calls = batch_counter()
    return {"calls": calls.seen, **lab.fit(StopsItself(), calls, max_epochs=3)}


@row(GROUP, "`should_stop` before `min_steps`")
def _(lab):
    return lab.fit(StopsItself(), max_epochs=3, min_steps=6)


@row(GROUP, "`should_stop` before `min_epochs`")
def _(lab):
    return lab.fit(StopsItself(), max_epochs=3, min_epochs=2)


class EndsEpoch(Ordinary):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


@row(GROUP, "`on_train_batch_start` returns -1: the epoch ends")
def _(lab):
    return lab.fit(EndsEpoch(), max_epochs=2)


class SkipsBatch(Ordinary):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@row(
    GROUP,
    "`training_step` returns `None`: the batch is left out",
    dict.fromkeys(SEVERAL, "by returning None in distributed training is not supported"),
)
def _(lab):
    return lab.fit(SkipsBatch())


@row(GROUP, "`trainer.fit` twice, the second goes on")
def _(lab):
    trainer, module = lab.trainer(), Ordinary()
    trainer.fit(module, lab.loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, lab.loader())
    return lab.seen(trainer)


@row(GROUP, "another trainer fits the same module further")
def _(lab):
    module = Ordinary()
    lab.fit(module)
    return lab.fit(module)


@row(GROUP, "`trainer.validate`", quick=True)
def _(lab):
    return {"validated": lab.trainer().validate(Ordinary(), lab.loader(), verbose=False)}


@row(GROUP, "`trainer.test`")
def _(lab):
    return {"tested": lab.trainer().test(Ordinary(), lab.loader(), verbose=False)}


@row(GROUP, "`trainer.predict`", quick=True)
def _(lab):
    predicted = lab.trainer().predict(Ordinary(), lab.loader())
    return {"predicted": [lab.everywhere(batch.float()) for batch in predicted]}


@row(GROUP, "`trainer.predict(return_predictions=False)`")
def _(lab):
    calls = Calls("on_predict_batch_end")
    nothing = lab.trainer(calls).predict(Ordinary(), lab.loader(), return_predictions=False)
    return {"returned": nothing is None, "calls": calls.seen}


@row(GROUP, "fit, validate, test and predict in a row")
def _(lab):
    trainer, module = lab.trainer(), Ordinary()
    trainer.fit(module, lab.loader(), lab.loader(1, first=1))
    return {
        "validated": trainer.validate(module, lab.loader(2, first=1), verbose=False),
        "tested": trainer.test(module, lab.loader(2, first=2), verbose=False),
        "predicted": [lab.everywhere(batch.float()) for batch in trainer.predict(module, lab.loader(2, first=3))],
    }


@row(GROUP, "`inference_mode=False`")
def _(lab):
    flags = []

    class Looks(Ordinary):
        def validation_step(self, batch, batch_idx):
            flags.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))
            super().validation_step(batch, batch_idx)

    trainer = lab.trainer(inference_mode=False)
    trainer.validate(Looks(), lab.loader(2), verbose=False)
    return {"flags": flags, "metrics": metrics(trainer)}


class Interrupts(Ordinary):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise KeyboardInterrupt


class Sees(Callback):
    def __init__(self):
        self.seen = []

    def on_exception(self, trainer, pl_module, exception):
        self.seen.append((type(exception).__name__, trainer.global_step, trainer.state.status.value))


@row(GROUP, "`KeyboardInterrupt` on all processes")
def _(lab):
    sees = Sees()
    try:
        lab.fit(Interrupts(), sees)
    except SystemExit as end:
        sees.seen.append(end.code)
    return {"seen": sees.seen}


class Terminates(Ordinary):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@row(GROUP, "SIGTERM to one process: the step under way is the last of all")
def _(lab):
    sees = Sees()
    before = signal.getsignal(signal.SIGTERM)
    try:
        lab.fit(Terminates(), sees)
    except SIGTERMException:
        return {"ended": True, "steps": sees.seen[0][1], "handler": signal.getsignal(signal.SIGTERM) == before}
    return {"ended": False}
