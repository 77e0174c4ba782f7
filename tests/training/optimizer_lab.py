"""Optimizers of other people that are more than one element-wise step, as small as they can be."""

import torch
from torch.optim import Optimizer


def _trained(group):
    return [parameter for parameter in group["params"] if parameter.grad is not None]


class _Base(Optimizer):
    """Runs the closure once, and then ``update`` on each group."""

    def __init__(self, params, lr=0.02, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.update()
        return loss

    def update(self):
        for group in self.param_groups:
            for parameter in _trained(group):
                self.update_one(parameter, group)

    def update_one(self, parameter, group):
        raise NotImplementedError


class LayerNormed(_Base):
    """A step as long as the tensor's norm, whatever that of the gradient (LARS); its name says nothing."""

    def update_one(self, parameter, group):
        ratio = parameter.norm() / (parameter.grad.norm() + 1e-9)
        parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


class Mixed(LayerNormed):
    """Only some groups have a step for each tensor."""

    def __init__(self, params):
        super().__init__(params, normed=False)

    def update_one(self, parameter, group):
        if group["normed"]:
            super().update_one(parameter, group)
        else:
            parameter.sub_(parameter.grad, alpha=group["lr"])


class Factored(_Base):
    """Second moments of rows and columns (Adafactor)."""

    def update_one(self, parameter, group):
        state = self.state[parameter]
        square = parameter.grad.square() + 1e-12
        if parameter.ndim < 2:
            update = parameter.grad / state.setdefault("square", torch.zeros_like(square)).lerp_(square, 0.5).sqrt()
        else:
            row = state.setdefault("row", torch.zeros_like(square.mean(1))).lerp_(square.mean(1), 0.5)
            column = state.setdefault("column", torch.zeros_like(square.mean(0))).lerp_(square.mean(0), 0.5)
            update = parameter.grad / (row[:, None] * column / row.mean()).sqrt()
        parameter.add_(update, alpha=-group["lr"])


class Orthogonal(_Base):
    """Orthogonalised matrices (Muon)."""

    def update_one(self, parameter, group):
        update = parameter.grad
        if parameter.ndim == 2:
            update = update / (update.norm() + 1e-9)
            for _ in range(3):
                update = 1.5 * update - 0.5 * update @ update.T @ update
        parameter.add_(update, alpha=-group["lr"])


class GlobalSum(_Base):
    """A step size from a sum over all parameters (Prodigy, D-Adaptation), kept in the groups."""

    def update(self):
        gradients = [parameter.grad for group in self.param_groups for parameter in _trained(group)]
        total = sum(gradient.abs().sum() for gradient in gradients)
        for group in self.param_groups:
            group["total"] = group.get("total", 0.0) + float(total)
            for parameter in _trained(group):
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["total"])


class Sharpness(_Base):
    """Takes the gradient of a step where it is largest nearby (SAM): two closures, and a norm over all parameters."""

    def __init__(self, params, base=torch.optim.SGD, rho=0.3, **options):
        super().__init__(params, rho=rho, **options)
        self.base = base(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in _trained(group)]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / norm))
        closure()
        for parameter in parameters:
            parameter.data = self.state[parameter]["old"]  # another tensor in its place, as is often done
        self.base.step()
        return loss


class Extragradient(_Base):
    """Element-wise, with two closures: the step is taken with the gradient of where it would lead."""

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [(parameter, group) for group in self.param_groups for parameter in _trained(group)]
        old = [parameter.clone() for parameter, _ in parameters]
        for parameter, group in parameters:
            parameter.add_(parameter.grad, alpha=-10 * group["lr"])
        closure()
        for (parameter, group), value in zip(parameters, old, strict=True):
            parameter.copy_(value).add_(parameter.grad, alpha=-group["lr"])
        return loss


class ScheduleFree(_Base):
    """Averages its own iterates; ``eval`` puts the average at the parameters and ``train`` takes it away again."""

    def __init__(self, params, lr=0.05, beta=0.7):
        super().__init__(params, lr=lr, beta=beta, k=0, train_mode=False)

    @torch.no_grad()
    def eval(self):
        self._switch(False, lambda group: 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self):
        self._switch(True, lambda group: 1 - group["beta"])

    def _switch(self, mode, weight):
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] is not mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight(group))
            group["train_mode"] = mode

    def update(self):
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            weight = 1 / (group["k"] + 1)
            for parameter in _trained(group):
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, weight)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
            group["k"] += 1


class ScheduleFreeDense(ScheduleFree):
    """In training from the start."""

    def __init__(self, params, lr=0.05, beta=0.7):
        super().__init__(params, lr, beta)
        for group in self.param_groups:
            group["train_mode"] = True


class Lookahead(_Base):
    """Wraps another optimizer, and goes back half of the way every few steps; its state is there from the start."""

    def __init__(self, base, every=3):
        self.base, self.every, self.count = base, every, 0
        super().__init__(base.param_groups)
        self.param_groups = base.param_groups
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def update(self):
        self.base.step()
        self.count += 1
        for group in self.param_groups if self.count % self.every == 0 else ():
            for parameter in _trained(group):
                slow = self.state[parameter]["slow"]
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Counting(_Base):
    """Adam with counters as tensors."""

    def update_one(self, parameter, group):
        state = self.state[parameter]
        step = state.setdefault("step", torch.zeros(()))
        step += 1
        average = state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        parameter.sub_(group["lr"] * average / (1 - 0.9**step))


class Quantised(_Base):
    """Momentum in 8 bits, a scale for each block of 256 elements; small tensors are not quantised."""

    def update_one(self, parameter, group):
        state, size = self.state[parameter], parameter.numel()
        if size < 4096:
            average = state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(average, alpha=group["lr"])
            return
        blocks = -(-size // 256)
        codes = state.get("codes", torch.zeros(blocks, 256, dtype=torch.int8))
        scales = state.get("scales", torch.zeros(blocks, 1))
        average = (codes * scales).view(-1)[:size].view(parameter.shape).lerp(parameter.grad, 0.1)
        padded = torch.zeros(blocks * 256)
        padded[:size] = average.reshape(-1)
        state["scales"] = padded.view(blocks, 256).abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        state["codes"] = (padded.view(blocks, 256) / state["scales"]).round().to(torch.int8)
        parameter.sub_(average, alpha=group["lr"])


class Langevin(_Base):
    """A step with noise."""

    def update_one(self, parameter, group):
        parameter.sub_(parameter.grad + 0.1 * torch.randn_like(parameter), alpha=group["lr"])


class OwnLists(_Base):
    """Keeps the parameters in a list of its own, and updates those."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.everything = [parameter for group in self.param_groups for parameter in group["params"]]

    def update(self):
        for parameter in self.everything:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class Declared(LayerNormed):
    """Said to be element-wise, truly or not."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class InheritsDeclaration(Declared):
    """Takes another step than the class that was declared."""

    @torch.no_grad()
    def step(self, closure=None):
        return LayerNormed.step(self, closure)


class ClippedAdamW(torch.optim.AdamW):
    """A subclass of an element-wise optimizer that is not one."""

    @torch.no_grad()
    def step(self, closure=None):
        def clipping():
            loss = closure()
            for group in self.param_groups:
                for parameter in _trained(group):
                    parameter.grad.div_(parameter.grad.norm().clamp_min(0.1))
            return loss

        return super().step(clipping)
