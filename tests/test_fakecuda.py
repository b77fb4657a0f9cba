"""The fake GPUs notice what is planted, and nothing in the same code done right."""

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns
from textwrap import dedent
from typing import Any

import faults
import pytest
import torch
from fakecuda import build, operators
from recorded import once
from torch import nn

HERE = Path(__file__).resolve().parent
FAULTS = faults.known("gpu")
WAITS = """
    side = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    z = y * 2
"""
FREED = """
    side = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
"""
TO_GPU = """
    x = torch.ones(1000, pin_memory=True)
    y = x.to("cuda", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    x.zero_()
"""
TO_HOST = """
    x = torch.ones(1000, device="cuda").to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
"""
INTO_PAGEABLE = """
    x = torch.empty(1000)
    x.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    del x
"""
ADAM = """
    weight = torch.nn.Parameter(torch.ones(3, device="cuda:1"))
    adam = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    adam.step()
    state = adam.state[weight]
    state["exp_avg"] = state["exp_avg"].to("cuda:1")
    adam.step()
"""
FORK = """
    {touch}
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            os.write(pipe[1], str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.set_blocking(pipe[0], False)
    try:
        raise RuntimeError(os.read(pipe[0], 1000).decode())
    except BlockingIOError:
        pass
"""
GRAPH = """
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        y = x + 1
        y.sum()
    graph.replay()
    assert y.tolist() == [2, 2, 2]
"""
CONTEXT = """
    x = torch.ones(3, device="cuda:0")
    torch.cuda.default_generators[1].manual_seed(1)
"""
THREAD = """
    with torch.accelerator.device_index(1):
        x = torch.ones(3, device="cuda")
        event = torch.cuda.current_stream().record_event()
    def wait():
        with torch.cuda.device(1):
            event.synchronize()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
"""
# What is right; what of it is left out or put in its place; what is said then.
PLANTED = {
    "a stream is not waited for": (
        WAITS,
        ("torch.cuda.current_stream().wait_stream(side)", ""),
        "RACE: mul.out reads on cuda:0 stream 0, which does not wait for add.out",
    ),
    "a stream does not wait": (
        WAITS,
        ("side.wait_stream(torch.cuda.current_stream())", ""),
        "RACE: add.out reads",
    ),
    "memory is freed without record_stream": (
        FREED,
        ("x.record_stream(side)", ""),
        "HAZARD: memory of cuda:0 stream 0 is freed",
    ),
    "a pinned tensor is overwritten while it is copied": (
        TO_GPU,
        ("torch.cuda.current_stream().synchronize()", ""),
        "HAZARD: aten::zero_ on the CPU writes a tensor that a copy to the GPU",
    ),
    "a number is used before it is there": (
        TO_HOST,
        ("event.synchronize()", "x.sum()"),
        "HAZARD: aten::sum on the CPU reads a tensor that a copy to the host",
    ),
    "item reads before it is there": (
        TO_HOST,
        ("event.synchronize()", "x[0].item()"),
        "HAZARD: aten::_local_scalar_dense on the CPU reads",
    ),
    "numpy reads before it is there": (
        TO_HOST,
        ("event.synchronize()", "x.numpy()"),
        "HAZARD: Tensor.numpy on the CPU reads",
    ),
    "a file is written before it is there": (
        TO_HOST,
        ("event.synchronize()", "torch.save(x, io.BytesIO())"),
        "HAZARD: torch.save on the CPU reads",
    ),
    "memory of the host is freed while it is written": (
        INTO_PAGEABLE,
        ("torch.cuda.synchronize()", ""),
        "HAZARD: memory of the host is freed while a copy to the host",
    ),
    "an optimizer's state is on another GPU": (
        ADAM,
        ('state["exp_avg"].to("cuda:1")', 'state["exp_avg"].to("cuda:0")'),
        "RuntimeError: Tensors of the same index must be on the same device",
    ),
    "a tensor of the CPU meets one of a GPU": (
        ADAM,
        ("adam.step()\n", 'weight.detach() + torch.ones(3, device="cpu")\n'),
        "RuntimeError: Expected all tensors to be on the same device",
    ),
    "the host waits in the hot path": (
        'loss = torch.ones((), device="cuda"); torch.cuda.set_sync_debug_mode("error"); pass',
        ("pass", "loss.item()"),
        "RuntimeError: called a synchronizing CUDA operation (_local_scalar_dense)",
    ),
    "a blocking copy in the hot path": (
        'x = torch.ones(3).pin_memory(); torch.cuda.set_sync_debug_mode("error"); '
        'x.to("cuda", non_blocking=True)',
        ("non_blocking=True", "non_blocking=False"),
        "RuntimeError: called a synchronizing CUDA operation (a copy to the GPU)",
    ),
    "a GPU is made current and not used": (
        CONTEXT,
        ("torch.cuda", "with torch.cuda.device(1): torch.cuda"),
        "CONTEXT: cudaSetDevice makes one on cuda:1, in a process whose own GPUs are cuda:0",
    ),
    "a thread waits while another GPU is current": (
        THREAD,
        ("torch.cuda.device(1)", "torch.cuda.device(-1)"),
        "CONTEXT: cudaEventSynchronize makes one on cuda:0",
    ),
    "a fork of a process that has used CUDA uses it": (
        FORK.format(touch="pass"),
        ("pass\n", 'torch.ones(1, device="cuda")\n'),
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess",
    ),
    "a graph waits while it is captured": (
        GRAPH,
        ("y.sum()", "y.sum().item()"),
        "RuntimeError: CUDA error: operation failed due to a previous error during capture",
    ),
    "a graph replays on freed memory": (
        GRAPH,
        ("graph.replay()", "del x; graph.replay()"),
        "GRAPH: a replay uses memory that was freed",
    ),
    "more memory than there may be": (
        'torch.cuda.set_per_process_memory_fraction(0.001, 0); torch.empty(2**20, device="cuda")',
        ("2**20", "2**27"),
        "OutOfMemoryError: CUDA out of memory",
    ),
    "an operator has no CUDA kernel": (
        'torch.ones(2, 3, device="cuda").sum()',
        (".sum()", ".to_mkldnn()"),
        "Could not run 'aten::to_mkldnn'",
    ),
}
CHILD = """
import gc, io, json, os, sys, threading
from pathlib import Path
import torch
from fakecuda import gpus, report
done, told = {}, Path(os.environ["FAKECUDA_REPORT"])
for name, code in json.load(sys.stdin):
    pipe = os.pipe()
    try:
        exec(code, {"torch": torch, "io": io, "os": os, "pipe": pipe, "threading": threading})
        error = []
    except Exception as raised:
        error = [f"{type(raised).__name__}: {raised}"]
    gc.collect()
    done[name] = error + report.violations(told.read_text())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    told.write_text("")
    gpus.library.violations(True)
    gpus.library.forget_contexts()
json.dump(done, sys.stdout)
"""


@once
def found() -> dict[str, list[str]]:
    """By name, and `right: name` for the same code as it should be: what was noticed."""
    if reason := build.why_not():
        pytest.skip(reason)
    codes = []
    for name, (code, (here, instead), _) in PLANTED.items():
        assert here in code, name
        codes += [(f"right: {name}", code), (name, code.replace(here, instead))]
    forks = [(name, dedent(code)) for name, code in codes if "fork" in code]
    others = [(name, dedent(code)) for name, code in codes if "fork" not in code]
    return {**child([forks[0]]), **child([*others, *forks[1:]])}


def child(codes: list[tuple[str, Any]], script: str = CHILD, *words: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "fakecuda"), "2", "-c", script, *words],
        input=json.dumps(codes),
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_noticed(name):
    assert any(PLANTED[name][-1] in line for line in found()[name]), found()[name]


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_right_is_left_alone(name):
    right = [line for line in found()[f"right: {name}"] if not line.startswith("UserWarning")]
    assert right == []


# What torch computes by kernels for GPUs alone, or chooses by the device


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "module",
    [nn.GRU(3, 4, 2), nn.GRU(3, 4, bias=False), nn.LSTM(3, 4, 2), nn.ConvTranspose1d(5, 2, 2)],
    ids=str,
)
def test_a_gpu_computes_what_the_cpu_does(module):
    def gradients(device):
        mine = deepcopy(module).to(device, torch.float64)
        given = rows.to(device).requires_grad_()
        with (
            nullcontext() if "FAKECUDA" in os.environ else torch.backends.cudnn.flags(enabled=False)
        ):
            result = mine(given)  # a real GPU has no second derivative by cuDNN
        result = result if isinstance(result, torch.Tensor) else result[0]
        loss = result.square().sum()
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + first.square().sum()).backward()
        return [part.cpu() for part in (result.detach(), given.grad, *parameters(mine))]

    def parameters(mine):
        return [weight.grad for weight in mine.parameters()]

    rows = torch.randn(6, 5, 3, dtype=torch.float64)
    for one, other in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


# The build


def slowly(work: Path, library: Path) -> None:
    """Stands for the compiler, and notes each call."""
    with (build.cache() / "calls").open("a") as calls:
        calls.write("compiled\n")
    time.sleep(0.3)
    library.touch()


def test_two_processes_that_build_at_once_compile_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "why_not", lambda: None)
    monkeypatch.setattr(build, "_compile", slowly)
    monkeypatch.setattr(operators, "facts", dict)
    processes = [multiprocessing.get_context("fork").Process(target=build.built) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (build.cache() / "calls").read_text() == "compiled\n"
    assert (build.cache() / build.key() / build.LIBRARY).exists()


def test_a_build_that_failed_leaves_nothing_that_is_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "why_not", lambda: None)
    monkeypatch.setattr(build, "FLAGS", ["--no-such-flag"])
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'g++: error: no such flag' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=os.pathsep)
    with pytest.raises(
        build.CanNotBuild, match=r"^g\+\+ can't compile fake GPUs: g\+\+: error: no"
    ):
        build.built()
    assert [path.suffix for path in build.cache().iterdir()] == [".lock"]


def test_without_a_compiler_the_command_and_its_tests_say_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = "fake GPUs are compiled by g++, and there is none; install g++"
    assert build.why_not() == line
    command = [sys.executable, str(HERE / "fakecuda"), "1", "-c", "pass"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"{line}\n")


def test_a_command_has_its_gpus_whatever_is_hidden_and_within_another_one(monkeypatch, tmp_path):
    if reason := build.why_not():
        pytest.skip(reason)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # of real GPUs
    copytree(HERE / "fakecuda", tmp_path / "fakecuda", ignore=ignore_patterns("__pycache__"))
    commands = [sys.executable, HERE / "fakecuda", "1", tmp_path / "fakecuda", "2"]
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([*commands, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_the_gpus_are_not_bound_to_the_environment_that_they_were_compiled_in():
    if reason := build.why_not():
        pytest.skip(reason)
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = str(Path(spec.origin).parent / "lib")
    assert libraries.encode() not in (build.built() / build.LIBRARY).read_bytes()


# Bugs planted in dpframe


# Each in a fork of one process, which has imported what they import, but for dpframe.
FORKS = """
import json, os, sys
import hydra, pytest, torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import torch.utils.tensorboard, torchmetrics
done = {}
for house, tests in json.load(sys.stdin):
    pid = os.fork()
    if not pid:
        os.chdir(house)
        said = os.open("said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.path[:0] = [house, house + "/tests"]
        code = pytest.main(["-q", "-n", "0", "-x", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done[house] = [str(code), open(house + "/said").read()]
json.dump(done, sys.stdout)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, list[str]]:
    """The exit code of pytest with each fault's tests, and what it printed."""
    if reason := build.why_not():
        pytest.skip(reason)
    houses = {fault: str(tmp_path_factory.mktemp("house") / "copy") for fault in FAULTS}
    for fault, house in houses.items():
        faults.plant(fault, faults.copied(Path(house)))
    tests = [(house, shlex.split(fault.tests)) for fault, house in houses.items()]
    done = child(tests, FORKS)
    return {fault.name: done[house] for fault, house in houses.items()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bug_that_is_planted_in_dpframe_fails_its_test(fault, ended):
    code, said = ended[fault.name]
    assert code == "1", said
    assert re.search(r"1 failed|violation\(s\)", said), said
