"""``olmoe-lightning parity``: processes of its own, the table, the exit status, and failures."""

import pytest

from olmoe_lightning.cli import main
from olmoe_lightning.tools.parity import ParityCase, ParityError, run_parity


@pytest.mark.slow
def test_the_command_prints_the_table_and_what_goes_on(capsys):
    assert main(["parity", "--devices", "2", "--expert-parallel", "2", "--accumulate", "2", "--clip", "1.0"]) == 0
    out, err = capsys.readouterr()
    assert "gradients: experts" in out
    assert "replicas: dense weights" in out
    assert "quantities agree" in out
    assert "the reference is done" in err


@pytest.mark.parity
def test_a_mistake_on_purpose_ends_with_status_one(capsys):
    assert main(["parity", "--devices", "2", "--expert-parallel", "2", "--break", "expert_scale"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("gradients: experts") and line.endswith("DEVIATES") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "4", "--expert-parallel", "3"], "devices (4) must be divisible by expert_parallel (3)"),
        (["--devices", "2", "--expert-parallel", "2", "--comm", "local"], "take 'all_to_all'"),
        (["--devices", "2", "--break", "expert_scale"], "expert_parallel (1)"),
    ],
)
def test_wrong_input_is_one_sentence(options, message, capsys):
    assert main(["parity", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parity
def test_the_traceback_of_a_process_that_fails_is_shown(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ParityError, match=r"rank \d of 2 failed") as caught:
        run_parity(ParityCase(devices=2))
    assert "Traceback" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)


def test_processes_that_do_not_end_in_time_show_what_they_were_doing():
    with pytest.raises(ParityError, match=r"no answer from ranks \[0\] of 1 within 0\.1 s") as caught:
        run_parity(ParityCase(devices=2), timeout=0.1)
    assert 'processes.py", line' in str(caught.value)
