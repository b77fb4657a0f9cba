"""What a task that needs a Trainer for its steps must equal: one Trainer on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpframe import Trainer
from dpframe.plugin import checkpoint
from dpframe.plugins.verify.course import Course
from dpframe.plugins.verify.distance import Curve, Weights
from dpframe.plugins.verify.measure import run_alone
from dpframe.strategies import CPU


def reference(course: Course) -> Curve:
    run = run_alone(replace(course, is_saved=False), "cpu", Path())
    timed = ("step/samples_per_second",)
    return Curve({name: at for name, at in run.log.items() if name not in timed}, run.weights)


def evaluate(course: Course, weights: Weights, step: int) -> tuple[Curve, frozenset[str]]:
    """The validation of these weights, as logged."""
    task, data = course.build()
    with CPU() as strategy:
        trainer: Any = Trainer(task, data, strategy=strategy, settings=course.settings)
        checkpoint.load_task(task, {"task": weights})
        log = {name: [(step, value)] for name, value in trainer.validate().items()}
    return Curve(log, {}), frozenset()
