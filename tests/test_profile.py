"""`trainer.profile=true`: every moment counted once, and not a bit of the numbers changed."""

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorder
from small import Hooks, Small, fitted, is_same

from dpframe import Trainer
from dpframe.trainer.profile import PARTS, PREFIX


def profiled(**given) -> tuple[Trainer, dict[str, float]]:
    recorder = Recorder()
    one = fitted(loggers=[recorder], profile=True, **{"directory": "", **given})
    step, scalars = recorder.log_[-1]
    assert step == one.global_step
    return one, {name.removeprefix("profile/"): value for name, value in scalars.items()}


def test_the_parts_are_all_there_is(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "dpframe"):
        _, parts = profiled(directory=tmp_path)
    names = [*PARTS, "rest"]
    assert list(parts) == [name.replace(" ", "_") for name in names]
    assert all(seconds >= 0 for seconds in parts.values())
    table = caplog.records[-1].getMessage().splitlines()
    trace = tmp_path / "trace.json.gz"
    hint = f"every operation on a timeline: open {trace} in https://ui.perfetto.dev"
    titles = ["where the time went", *names, "in 8 steps after the first two", hint]
    assert [line.split("  ")[0] for line in table] == titles
    assert "aten::linear" in {event["name"] for event in events_of(tmp_path)}


def test_a_fit_after_a_fit_has_a_profile_of_its_own():
    longer = fitted(max_epochs=2)
    trainer, _ = profiled(max_epochs=1)
    steps, first = trainer.global_step, trainer.training.profile
    trainer.settings = replace(trainer.settings, max_epochs=longer.epoch + 1)
    trainer.fit(longer.state_dict(), resume_anyway=True)
    assert trainer.global_step == 3 * steps
    assert None not in (first, trainer.training.profile)
    assert trainer.training.profile is not first


class Marked(Small):
    """Does in a step what nothing else does."""

    def training_step(self, batch):
        torch.zeros(1).erf()
        return super().training_step(batch)


def test_each_part_has_the_operations_that_are_done_in_it(tmp_path):
    hooks = Hooks(on_step_end=lambda trainer: torch.zeros(1).atan())
    _, parts = profiled(make=Marked, callbacks=[hooks], directory=tmp_path)
    rest = parts.pop("rest")  # what the others leave, which may be nothing
    assert rest >= 0 and min(parts.values()) > 0, (rest, parts)
    assert parts_of("aten::erf", tmp_path) == {"forward", "validation"}
    assert parts_of("aten::atan", tmp_path) == {"callbacks"}
    assert parts_of("Optimizer.step#SGD.step", tmp_path) == {"optimizer"}


def parts_of(operation: str, directory: Path) -> set[str]:
    """The parts in which a trace has it."""
    whole = [event for event in events_of(directory) if event.get("ph") == "X"]
    done = [event for event in whole if event["name"] == operation]
    assert done
    return {
        part["name"].removeprefix(PREFIX)
        for part in whole
        if part["name"].startswith(PREFIX)
        and any(part["ts"] <= each["ts"] <= part["ts"] + part["dur"] for each in done)
    }


def events_of(directory: Path) -> list[dict[str, Any]]:
    trace = (directory / "trace.json.gz").read_bytes()
    return json.loads(gzip.decompress(trace))["traceEvents"]


def test_a_profile_changes_nothing_that_is_computed():
    plain, (one, _) = fitted(), profiled()
    assert is_same(one.task.state_dict(), plain.task.state_dict())
    assert is_same(one.metrics, plain.metrics)


def test_a_run_of_too_few_steps_says_so_and_one_that_fails_ends_its_profile(caplog):
    with caplog.at_level(logging.INFO, "dpframe"):
        fitted(profile=True, max_steps=1, directory="")
    assert caplog.records[-1].getMessage().endswith("too few steps to record any")
    with pytest.raises(ZeroDivisionError):
        profiled(callbacks=[Hooks(on_step_end=lambda t: 1 // (4 - t.global_step))])
    assert profiled()  # torch has one profiler at a time
