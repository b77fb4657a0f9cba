"""A device that is out of memory, or fails, is one line, and the last checkpoint is whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from injector import fail_at, last, run, weights
from small import Rows, Small, fitted, is_same, trainer

import dpframe
from dpframe.errors import Failure
from dpframe.modes import error_lines
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import SingleGPU

TWO = ("strategy=ddp", "trainer.gpus=2", "logger=none")
ALONE = ("strategy=cpu", "logger=none")
SAVES = "callbacks.checkpoint.every_n_steps=3"
IN_USE = r"this process took \d+\.\d of \d+\.\d GiB"


def line_of(folder: Path, *overrides: str, kind: str, at: int, rank: int = 0) -> str:
    done = run(folder, *overrides, **fail_at(rank, at, kind))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("dpframe: ").rstrip()


def test_out_of_memory_is_one_line_with_the_batch_and_the_keys_to_turn(tmp_path):
    line = line_of(tmp_path, *ALONE, SAVES, kind="oom", at=5)
    assert re.fullmatch(
        rf"cpu is out of memory in training: {IN_USE}; batch 4 = 1 replica x 4; set "
        r"trainer\.micro_batch=2, which is the same update, or "
        r"trainer\.checkpoint_activations=true, or trainer\.precision=bf16; the "
        r"last checkpoint is whole: go on with resume=run, with resume_anyway=true for another "
        r"batch or precision",
        line,
    )
    log = (tmp_path / "run/run.log").read_text()
    assert "OutOfMemoryError: CUDA out of memory. Tried to" in log and line in log.splitlines()[-1]
    assert last(tmp_path)["progress"]["global_step"] == 3
    assert run(tmp_path, "resume=run").returncode == 0
    assert last(tmp_path)["progress"]["global_step"] == 24


def test_what_saves_memory_already_is_no_advice(tmp_path):
    given = ["trainer.precision=bf16-true", "trainer.checkpoint_activations=[net.0]"]
    given += ["trainer.share_check=off"]  # which would meet the fault first
    line = line_of(tmp_path, *ALONE, *given, "trainer.accumulate=2", kind="oom", at=1)
    assert line.endswith("; set trainer.micro_batch=2, which is the same update")
    assert "OutOfMemoryError" in (tmp_path / "run/run.log").read_text()


class Full(Small):
    def training_step(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (9, "batch 9 = 3 replicas x 3; set trainer.micro_batch=1, which is the same update, or tr"),
        (3, "batch 3 = 3 replicas x 1; set trainer.precision=bf16"),
    ],
)
def test_a_batch_is_halved_while_a_replica_has_several_rows(rows, said):
    strategy = DataParallel(3, "cpu")
    made = trainer(Full(), Rows(40, rows), strategy=strategy, checkpoint_activations="net.0")
    with (
        pytest.raises(Failure, match=f"; {said}"),
        error_lines.explain(strategy, made.settings, made),
    ):
        made.fit()


def test_what_can_not_be_cut_and_a_piece_have_advice_of_their_own():
    normed = Full()
    normed.net.insert(1, torch.nn.BatchNorm1d(8))
    cases: list[tuple[Any, Any, str]] = [
        (normed, {}, "set data.batch_size=4 trainer.accumulate=2, which are the same updates, or "),
        (Full(), {"micro_batch": 4}, "set trainer.micro_batch=2, which is the same update, or "),
        (Full(), {"micro_batch": 1}, "set trainer.checkpoint_activations=true, or "),
    ]
    for task, settings, said in cases:
        made = trainer(task, Rows(40, 8), **settings)
        with (
            pytest.raises(Failure, match=f"; {said}"),
            error_lines.explain(made.strategy, made.settings, made),
        ):
            made.fit()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_out_of_memory_ends_the_job_with_its_line(tmp_path, rank):
    line = line_of(tmp_path, *TWO, SAVES, "trainer.max_restarts=2", kind="oom", at=5, rank=rank)
    assert line.startswith(f"cpu is out of memory in training on rank {rank}: this process took ")
    assert "; batch 4 = 2 replicas x 2; set trainer.micro_batch=1, which is the same " in line
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("OutOfMemoryError: CUDA out of memory") == 1 and line in log


@pytest.mark.parametrize(
    "words, kind, said",
    [
        ((), "oom-start", "in set-up: .*; the model does not fit; lower trainer.precision=32 to "),
        ((), "oom-validation", "in validation: .* = 1 replica x 4; set data.eval_batch_size=2,"),
        (
            ("mode=validate", "checkpoint=none"),
            "oom-validation",
            "in validation: .*; set data.eval_batch_size=2,",
        ),
    ],
)
def test_out_of_memory_elsewhere_is_told_by_where(tmp_path, words, kind, said):
    line = line_of(tmp_path, *ALONE, *words, kind=kind, at=0 if kind == "oom-start" else 1)
    assert re.match(f"cpu is out of memory {said}", line), line
    assert "resume=" not in line


@pytest.mark.parametrize(
    "words, said",
    [
        ((*ALONE, "mode=verify"), rf"in mode=verify, \w+: {IN_USE}; take a smaller task$"),
        ((*TWO, "mode=verify"), rf"in mode=verify.*: {IN_USE}; take a smaller task"),
    ],
)
@pytest.mark.whole
def test_a_report_that_is_out_of_memory_is_one_line(tmp_path, words, said):
    done = run(tmp_path, *words, **fail_at("all", 1, "oom"))
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    line = done.stderr.splitlines()[-1]
    assert re.match(f"dpframe: cpu is out of memory {said}", line), line


@pytest.mark.parametrize("kind", ["oom", "ecc"])
def test_a_rank_that_has_saved_nothing_itself_names_the_checkpoint_of_the_job(tmp_path, kind):
    fails = fail_at(1, 5, kind, after="run/checkpoints/last.ckpt")
    done = run(tmp_path, *TWO, SAVES, **fails)
    assert done.returncode == 1 and " on rank 1: " in done.stderr
    assert "; the last checkpoint is whole: go on with resume=run, " in done.stderr


def test_a_validation_that_is_out_of_memory_leaves_a_run_that_goes_on(tmp_path):
    line = line_of(tmp_path, *ALONE, SAVES, kind="oom-validation", at=4)
    assert " in validation: " in line
    assert line.endswith("; the last checkpoint is whole: go on with resume=run")


def test_a_program_catches_what_it_always_caught():
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        fitted(Full(), Rows())


# A device that fails


@pytest.mark.parametrize(
    "kind, said",
    [
        ("ecc", "uncorrectable ECC error encountered; the memory of this GPU is damaged, "),
        ("assert", "device-side assert triggered; a kernel met a value out of range, e.g. an "),
        ("launch", "unspecified launch failure; CUDA_LAUNCH_BLOCKING=1 in the environment makes "),
    ],
)
def test_a_device_that_fails_is_one_line_and_nothing_is_saved_after_it(tmp_path, kind, said):
    line = line_of(tmp_path, *ALONE, SAVES, kind=kind, at=5)
    assert line.startswith(f"cpu failed in training: CUDA error: {said}")
    assert line.endswith(
        "; this process can't use the device any more, and saves nothing; the last checkpoint is "
        "whole: go on with resume=run, or trainer.max_restarts=1 under strategy=ddp does so by "
        "itself"
    )
    assert "AcceleratorError: CUDA error: " in (tmp_path / "run/run.log").read_text()
    assert last(tmp_path)["progress"]["global_step"] == 3


def test_a_job_whose_device_fails_starts_itself_again_in_new_processes(tmp_path, undisturbed):
    setting = (*TWO, SAVES)
    done = run(tmp_path, *setting, "trainer.max_restarts=1", **fail_at(1, 5, "ecc"))
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("cpu failed in training on rank 1: CUDA error: uncorrectable ECC error")
    assert second == "restart 1 of 1 from run/checkpoints/last.ckpt, step 3"
    assert is_same(weights(tmp_path), undisturbed(*setting))


class Touches(dpframe.Callback):
    """The device, which fails again."""

    def on_exception(self, trainer: dpframe.Trainer, error: BaseException) -> None:
        raise torch.AcceleratorError("CUDA error: a second one")


def test_no_second_error_of_a_device_hides_the_first(caplog):
    class Fails(Small):
        def training_step(self, batch):
            raise torch.AcceleratorError("CUDA error: the first one")

    with pytest.raises(torch.AcceleratorError, match="the first one$") as caught:
        fitted(Fails(), Rows(), callbacks=[Touches()])
    assert caught.value.__context__ is None
    assert "CUDA error: a second one" in caplog.text


# On a GPU


class Hungry(Small):
    def training_step(self, batch):
        self.held = torch.empty(1 << 50, device=self.device)
        return super().training_step(batch)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SingleGPU, marks=pytest.mark.gpu(1)),
        pytest.param(DataParallel, marks=pytest.mark.gpu),
    ],
)
def test_a_gpu_that_is_out_of_memory_is_told_with_what_is_in_use(kind):
    strategy = kind(accelerator="cuda")
    strategy.setup()
    made = trainer(Hungry(), Rows(40, 12), strategy=strategy)
    with pytest.raises(Failure) as caught, error_lines.explain(strategy, made.settings, made):
        made.fit()
    replicas = f"{strategy.replicas} replica"
    assert re.match(
        r"cuda:\d is out of memory in training: \d+\.\d of \d+\.\d GiB are in use, at most \d+\.\d "
        rf"GiB by this process's tensors; batch 12 = {replicas}.*; set trainer\.micro_batch=",
        str(caught.value),
    )
    assert "OutOfMemoryError" in caught.value.details
