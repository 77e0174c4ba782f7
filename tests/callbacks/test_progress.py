"""OneLineProgress: what the bar shows, and honest rates after a resume."""

import pytest
from lightning.pytorch import Callback

from olmoe_lightning.callbacks import OneLineProgress, ThroughputMonitor
from olmoe_lightning.callbacks.progress import _readable


class Look(Callback):
    """Keeps what the bar holds after each batch; it comes after the bar."""

    def __init__(self, bar):
        self.bar, self.seen = bar, []

    def on_train_batch_end(self, trainer, pl_module, *_):
        tqdm = self.bar.train_progress_bar
        self.seen.append((tqdm.initial, tqdm.n, tqdm.total, self.bar.get_metrics(trainer, pl_module)))


def watched(make_trainer, **options):
    bar = OneLineProgress(refresh_rate=1)
    look = Look(bar)
    settings = {"enable_progress_bar": True, "max_steps": 4, "limit_val_batches": 1, "val_check_interval": 2}
    trainer = make_trainer(ThroughputMonitor(1, 0, peak_tflops=1.0), bar, look, **(settings | options))
    return trainer, look


def test_the_bar_shows_losses_and_a_readable_rate_and_no_version(make_trainer, small_moe, random_tokens, capsys):
    trainer, look = watched(make_trainer)
    trainer.fit(small_moe(), random_tokens())
    _, done, total, metrics = look.seen[-1]
    assert (done, total) == (4, 4)
    assert "v_num" not in metrics
    rate = metrics["tok/s/device"]
    assert "," in rate or float(rate) < 1000
    assert "tok/s/device=" in capsys.readouterr().out


def test_after_a_resume_the_rate_counts_only_what_this_run_did(make_trainer, small_moe, random_tokens, tmp_path):
    trainer, _ = watched(make_trainer)
    trainer.fit(small_moe(), random_tokens())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, look = watched(make_trainer, max_steps=6)
    trainer.fit(small_moe(), random_tokens(), ckpt_path=tmp_path / "a.ckpt")
    assert [(initial, n, total) for initial, n, total, _ in look.seen] == [(4, 5, 6), (4, 6, 6)]


def test_the_length_counts_accumulated_batches(make_trainer, small_moe, random_tokens):
    trainer, look = watched(make_trainer, accumulate_grad_batches=3)
    trainer.fit(small_moe(), random_tokens())
    assert look.seen[-1][:3] == (0, 12, 12)


@pytest.mark.parametrize(("value", "shown"), [(1.23456, "1.235"), (14806.0, "14,806"), ("text", "text"), (3, 3)])
def test_numbers_are_short(value, shown):
    assert _readable(value) == shown
