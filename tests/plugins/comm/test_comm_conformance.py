"""Our plugins are what a plugin has to be, and the suite that says so finds those that are not."""

import re

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import AllToAllComm, LocalComm, RowwiseComm
from olmoe_lightning.plugins.comm.conformance import (
    ConformanceError,
    check_comm_plugin,
    format_table,
    main,
    run_conformance,
)
from olmoe_lightning.tools.processes import WorkerError

ONE = Axis("expert", (0,), 0)


def expert_axis():
    return Axis("expert", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def check(make_plugin, dtype=torch.float32, timeout=20):
    """What all processes say: results, or the error."""
    try:
        return check_comm_plugin(make_plugin, expert_axis(), dtype=dtype, timeout=timeout)
    except ConformanceError as error:
        return error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_conforms(dtype):
    results = check_comm_plugin(LocalComm, ONE, dtype=dtype)
    assert max(result.deviation for result in results) == 0


@pytest.mark.parametrize("plugin", [AllToAllComm, RowwiseComm])
def test_plugins_of_many_processes_conform_on_one_without_a_group(plugin):
    assert check_comm_plugin(plugin, ONE)


@pytest.mark.parametrize("plugin", [AllToAllComm, RowwiseComm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_plugins_of_many_processes_conform(workers, size, dtype, plugin):
    by_rank = workers(size).run(check, plugin, dtype)
    for results in by_rank:
        assert isinstance(results, list), results
        assert len(results) > 20
    assert len({format_table(results) for results in by_rank}) == 1  # all processes say the same


class DropsARow(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        sent = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        keep = torch.ones(len(sent.rows_RD), 1, dtype=sent.rows_RD.dtype)
        keep[-1:] = 0
        return sent._replace(rows_RD=sent.rows_RD * keep)


class WrongExpertOrder(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        local = self._experts_local
        reversed_ids = expert_ids_TK // local * local + (local - 1 - expert_ids_TK % local)
        return super().dispatch(x_TD, reversed_ids, weights_TK)


class WrongOrderWithinExperts(AllToAllComm):
    """The last process first; it brings all home all the same."""

    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        sent = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        order, begin = [], 0
        for end in sent.offsets_E.tolist():
            order += reversed(range(begin, end))
            begin = end
        order = torch.tensor(order, dtype=torch.int64)
        handle = (sent.handle, order.argsort())
        return sent._replace(rows_RD=sent.rows_RD[order], row_weights_R=sent.row_weights_R[order], handle=handle)

    def combine(self, rows_RD, handle):
        return super().combine(rows_RD[handle[1]], handle[0])


class WeightsTwice(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        sent = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        return sent._replace(handle=(sent.handle, sent.row_weights_R))

    def combine(self, rows_RD, handle):
        return super().combine(rows_RD * handle[1][:, None].to(rows_RD.dtype), handle[0])


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class GradientDoubled(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        return super().dispatch(_Doubled.apply(x_TD), expert_ids_TK, weights_TK)


class NoGradientOfWeights(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        return super().dispatch(x_TD, expert_ids_TK, weights_TK.detach())


class NoGradientOfExperts(AllToAllComm):
    def combine(self, rows_RD, handle):
        return super().combine(rows_RD.detach(), handle) + 0 * rows_RD.sum()


class SwapsTwoProcesses(AllToAllComm):
    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        experts = self._spec.num_experts
        return super().dispatch(x_TD, (expert_ids_TK + self._experts_local) % experts, weights_TK)


class KeepsStateInThePlugin(AllToAllComm):
    """The last dispatch is the one that is combined."""

    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        sent = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        self.last = sent.handle
        return sent

    def combine(self, rows_RD, handle):
        return super().combine(rows_RD, self.last)


class ReadsUninitialisedMemory(AllToAllComm):
    def combine(self, rows_RD, handle):
        y = super().combine(rows_RD, handle)
        return y + 0 * torch.empty_like(y)


class AcceptsAnyNumberOfExperts(AllToAllComm):
    def setup(self, axis, spec):
        self._axis, self._spec, self._experts_local = axis, spec, spec.num_experts // axis.size


# Plugin -> the case that finds it, and what is said to differ there.
BROKEN = {
    DropsARow: ("balanced", "rows"),
    WrongExpertOrder: ("balanced", "rows"),
    WrongOrderWithinExperts: ("balanced", "rows"),
    WeightsTwice: ("balanced", "outputs"),
    GradientDoubled: ("balanced", "gradient of tokens"),
    NoGradientOfWeights: ("balanced", "gradient of weights"),
    NoGradientOfExperts: ("balanced", "gradient of w_down"),
    SwapsTwoProcesses: ("balanced", "rows"),
    KeepsStateInThePlugin: ("two dispatches before a combine", "raised"),
    ReadsUninitialisedMemory: ("NaN in new memory", "outputs"),
    AcceptsAnyNumberOfExperts: ("experts that cannot be shared out", "setup"),
}


@pytest.mark.parametrize("plugin", BROKEN, ids=lambda plugin: plugin.__name__)
def test_a_broken_plugin_is_found_and_what_it_does_wrong_is_named(workers, plugin):
    errors = workers(2).run(check, plugin)
    case, what = BROKEN[plugin]
    for error in errors:
        assert isinstance(error, ConformanceError)
        (result,) = (result for result in error.results if result.case == case)
        assert any(re.match(rf"rank \d: {what}[:\n]", problem) for problem in result.problems), result.problems
        assert plugin.__name__ in str(error)
    assert str(errors[0]) == str(errors[1])


def test_only_what_is_wrong_is_called_wrong(workers):
    (error, _) = workers(2).run(check, GradientDoubled)
    for result in error.results:
        assert all("gradient of tokens" in problem for problem in result.problems)
    passed = {result.case for result in error.results if not result.problems}
    assert {"no_grad", "tokens without gradient", "no tokens anywhere"} <= passed


class SkipsABackward(AllToAllComm):
    """A process that receives nothing gives back a fresh tensor: its backward exchanges nothing with the others."""

    def dispatch(self, x_TD, expert_ids_TK, weights_TK):
        sent = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        if len(sent.rows_RD) == 0:
            return sent._replace(rows_RD=torch.zeros_like(sent.rows_RD), row_weights_R=sent.row_weights_R.detach())
        return sent


def check_in_vain():
    check_comm_plugin(SkipsABackward, expert_axis(), timeout=1)


def test_a_plugin_that_leaves_others_waiting_is_found_without_hanging(workers):
    with pytest.raises(WorkerError) as caught:
        workers(2).run(check_in_vain, timeout=20)
    text = str(caught.value)
    assert "ConformanceError: SkipsABackward on 2 processes" in text
    assert re.search("a process whose experts get nothing +FAILED", text)
    assert "did not end this case within 1 s" in text


class RaisesOnce(LocalComm):
    def combine(self, rows_RD, handle):
        raise KeyError("no such handle")


def test_a_plugin_that_raises_is_shown_with_its_traceback():
    with pytest.raises(ConformanceError) as caught:
        check_comm_plugin(RaisesOnce, ONE)
    text = str(caught.value)
    assert "in combine" in text
    assert "KeyError: 'no such handle'" in text
    assert "the cases after an error were not run" in text


def test_a_plugin_that_cannot_run_here_is_not_checked(workers):
    (error, _) = workers(2).run(check, LocalComm)
    assert "it reaches only experts of its own process, but 2 processes share them" in str(error)


def test_the_suite_runs_from_a_shell(capsys):
    assert main(["olmoe_lightning.plugins:LocalComm", "--processes", "1"]) == 0
    assert re.search(r"(\d+) of \1 cases passed", capsys.readouterr().out)
    assert main([f"{__name__}:RaisesOnce", "--processes", "1"]) == 1
    assert "KeyError" in capsys.readouterr().out


def test_a_plugin_that_cannot_be_found_is_an_error_before_processes_are_started():
    with pytest.raises(ValueError, match="module:Class"):
        run_conformance("olmoe_lightning.plugins")
    with pytest.raises(ImportError, match="nowhere"):
        run_conformance("nowhere:Comm")
