"""How much memory a run took at most, in its last line and in summary.json."""

import json
import re

import pytest
import torch
from injector import run
from small import Rows, Small, fitted

from dpframe.callbacks.progress import Progress
from dpframe.devices import memory
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU

MIB = 2**20
MOST = 128 * MIB  # with the workspaces of cuBLAS, 65 MiB on an H100
LINE = r"\d+ steps in \S+ s, \S+ samples/s"


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (ValueError("not enough memory to learn from"), False),
    ],
)
def test_errors_of_a_full_memory_are_known(error, expected):
    assert memory.ran_out(error) is expected


def test_the_cpu_counts_no_tensors(capsys):
    made = fitted(strategy=CPU(), callbacks=[Progress()])
    assert memory.peaks(made.strategy) is None
    assert re.fullmatch(LINE, capsys.readouterr().out.splitlines()[-1])


def test_summary_json_of_the_cpu_says_null(tmp_path):
    assert run(tmp_path, "strategy=cpu", "trainer.max_steps=2").returncode == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["peak_memory"] is None


# On GPUs


class Large(Small):
    """Takes 8 MiB on each device in a step."""

    def training_step(self, batch):
        torch.zeros(8 * MIB, dtype=torch.uint8, device=batch[0].device)
        return super().training_step(batch)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SingleGPU, marks=pytest.mark.gpu(1)),
        pytest.param(DataParallel, marks=pytest.mark.gpu),
    ],
)
def test_the_most_that_tensors_took_on_each_gpu_is_told(capsys, kind):
    strategy = kind(accelerator="cuda")
    strategy.setup()
    memory.begin_peak(strategy.device)
    data = Rows(40, 10)
    made = fitted(Large(), data, strategy=strategy, callbacks=[Progress()])
    peaks = memory.peaks(made.strategy)
    assert len(peaks) == len(strategy.devices)
    assert all(8 * MIB <= peak < MOST for peak in peaks), peaks
    last = capsys.readouterr().out.splitlines()[-1]
    told = " + ".join(f"{peak / 2**30:.2f}" for peak in peaks)
    assert re.fullmatch(rf"{LINE}, {re.escape(told)} GiB at most", last)


def two_at_most() -> DDP:
    return DDP(min(2, torch.cuda.device_count()), "cuda")


def in_a_rank() -> list[int]:
    strategy = two_at_most()
    strategy.setup()
    try:
        return memory.peaks(fitted(Large(), Rows(40, 10), strategy=strategy).strategy)
    finally:
        strategy.close()


@pytest.mark.gpu
def test_the_main_rank_knows_the_most_of_each():
    peaks = two_at_most().launch(in_a_rank)
    assert len(peaks) == min(2, torch.cuda.device_count())
    assert all(8 * MIB <= peak < MOST for peak in peaks), peaks
