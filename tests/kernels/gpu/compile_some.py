"""Run in a process of its own, without ``TRITON_INTERPRET``: compiles cases and two controls, and prints JSON.

python compile_some.py CACHE_FOLDER < names.json
"""

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict

os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import triton
import triton.language as tl

from olmoe_lightning.kernels.gpu import compile as command
from olmoe_lightning.kernels.gpu.compile_case import CompileCase


@triton.jit
def divide_by_sum(x, y, stride, WIDTH: tl.constexpr):
    """All values must be kept until their sum is known."""
    at = tl.program_id(0).to(tl.int64) * stride + tl.arange(0, WIDTH)
    values = tl.load(x + at)
    tl.store(y + at, values / tl.sum(values, 0))


def control(name, width):
    return CompileCase(name, divide_by_sum, {"x": "*fp32", "y": "*fp32"}, {"WIDTH": width}, num_warps=1)


# 1024 values are 32 registers of each of 32 threads; 8192 are 256, and there are 255.
CONTROLS = [control("fits", 1024), control("does not fit", 8192)]


def own_functions(module):
    """What ``@triton.jit`` made in a module, as module:name."""
    made = [value for value in vars(module).values() if isinstance(value, triton.runtime.JITFunction)]
    return {full_name(function) for function in made if function.fn.__module__ == module.__name__}


def full_name(function):
    return f"{function.fn.__module__}:{function.fn.__name__}"


def reached(kernel):
    """The names of a kernel and of all that it calls."""
    called = (kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names)
    ours = [each for each in called if isinstance(each, triton.runtime.JITFunction)]
    return {full_name(kernel)}.union(*map(reached, ours))


def printed(*arguments):
    """Status and output of the command; what it compiles has been compiled before."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = command.main([*arguments])
    return [status, out.getvalue()]


def main():
    wanted = json.load(sys.stdin)
    by_name = {each.name: each for each in command.collect()}
    only = ("--only", wanted[0][0], "--sm", str(wanted[0][1]))
    result = {
        "kernels": [asdict(command.compile_case(by_name[name], sm)) for name, sm in wanted],
        "controls": {each.name: asdict(command.compile_case(each, 90)) for each in CONTROLS},
        "written": sorted(set().union(*map(own_functions, command.kernel_modules()))),
        "reached": {name: sorted(reached(each.kernel)) for name, each in by_name.items()},
        "table": printed(*only),
        "json": printed(*only, "--json"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
