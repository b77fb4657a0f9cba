"""What a run shows while it trains: a bar below a table on a terminal, lines everywhere else."""

import io
import logging
import math
import re
import signal
from contextlib import nullcontext, redirect_stdout
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from small import Clock, Hooks, Rows, Scripted, Streamed, fitted, trainer
from test_turns import Pair

from dpframe import Callback, Trainer
from dpframe.callbacks import live, progress
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.callbacks.live import Live
from dpframe.callbacks.monitor import Best
from dpframe.callbacks.newest import NewestLoss
from dpframe.callbacks.progress import Progress
from dpframe.errors import Interrupted
from dpframe.strategies.data_parallel import DataParallel

MOVES = r"\x1b\[[\d;?]*[A-Zhl]|\r"  # of the cursor, and what clears a line
LONG = {"data": Rows(80, 4), "max_epochs": 4, "log_every": 5}  # 20 steps an epoch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fitted(self, *parts: Any, callbacks: Any = (), **settings: Any) -> Trainer:
        with redirect_stdout(self):
            return fitted(*parts, callbacks=[*callbacks, Progress()], **settings)

    def frames(self) -> list[list[str]]:
        """The lines of each, without colours."""
        plain = re.sub(r"\x1b\[[\d;]*m", "", self.getvalue())
        frames = [part.splitlines() for part in re.split(rf"(?:{MOVES})+", plain) if part.strip()]
        return [
            frame
            for frame in frames
            if any(" validation batch " in line for line in frame)
            or any(" samples/s" in line and "steps in" not in line for line in frame)
        ]

    def bars(self) -> list[str]:
        return [line for frame in self.frames() for line in frame if re.search("[━╸╺]", line)]


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    return Terminal()


@pytest.fixture
def second_a_step(monkeypatch) -> Hooks:
    return Hooks(on_step_end=Clock(monkeypatch).ticks(1.0))


def messages(caplog) -> list[str]:
    return [line for record in caplog.records for line in record.getMessage().splitlines()]


def test_off_a_terminal_there_are_lines_of_epochs_and_a_table_at_the_end(monkeypatch, capsys):
    monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)  # as in a user's own script
    fitted(callbacks=[Progress()], max_epochs=3)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
    epochs = re.findall(
        r"^epoch (\d/3  step \d+)  train/loss \S+  .*val/loss \S+", out, re.MULTILINE
    )
    ends = [epochs[0], epochs[-1]]  # between them are those that took a second
    assert ends == ["1/3  step 5", "3/3  step 15"]
    *table, last = out.splitlines()[-7:]
    first = [line.split()[0] for line in table]
    assert first == ["metric", "-" * 10, "train/loss", "train/mae", "val/loss", "val/mae"]
    assert re.fullmatch(r"15 steps in \d+\.\d\d s, [\d,]+ samples/s", last)


def test_on_a_terminal_there_is_a_bar_and_no_line_an_epoch(terminal):
    for limit, of in (
        ({"max_epochs": 3}, "3/3"),
        ({"max_epochs": None, "max_seconds": 0.01}, r"\d+"),
    ):
        terminal.fitted(**limit)
        assert re.match(rf"epoch {of} ━+ [\d,]+ samples/s", terminal.bars()[-1])
    plain = re.sub(MOVES, "\n", re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()))
    assert not re.search(r"^epoch \d+(/\d+)?  step", plain, re.MULTILINE)
    assert len(re.findall(r"^\d+ steps in .* samples/s\s*$", plain, re.MULTILINE)) == 2


def test_80_columns_have_the_epoch_a_bar_the_pace_the_loss_and_what_is_monitored(
    terminal, second_a_step
):
    monitor = EarlyStopping(monitor="val/mae")
    terminal.fitted(callbacks=[second_a_step, monitor], **LONG)
    bars = terminal.bars()
    pattern = r"epoch 2/4 [━╸╺ ]{10} 4 samples/s  0:\d\d left  loss \S+  val/mae \S+.*"
    assert re.fullmatch(pattern, bars[30].rstrip()), "what does not fit is left out whole"
    assert len(bars) > 70


def test_40_columns_have_the_pace_and_the_time_left_beside_a_short_bar(
    terminal, second_a_step, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "40")
    terminal.fitted(callbacks=[second_a_step], **LONG)
    pattern = r"epoch 2/4 [━╸╺ ]{7} 4 samples/s  0:\d\d left"
    assert re.fullmatch(pattern, terminal.bars()[30].rstrip())


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(terminal, second_a_step, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.fitted(callbacks=[second_a_step], **LONG)
    lines = [line.rstrip() for line in re.split(rf"{MOVES}|\n", terminal.getvalue())]
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines[lines.index("") :]]
    assert max(len(line) for line in shown if "epoch" in line or "━" in line) <= columns
    assert all("━" in frame[-1] for frame in terminal.frames()), "it is never broken"


def test_a_bar_says_the_step_where_nobody_knows_the_end(terminal, second_a_step):
    data = Streamed(40, 4, val=False)
    terminal.fitted(callbacks=[second_a_step], data=data, max_epochs=1)
    assert re.match(r"epoch 1/1 [━╸╺ ]{10} step 8  4 samples/s  loss \S+ *$", terminal.bars()[7])


def test_the_time_left_is_that_of_the_clock_or_of_the_steps_whichever_ends_first(
    terminal, second_a_step
):
    data = Streamed(400, 4, val=False)
    terminal.fitted(callbacks=[second_a_step], data=data, max_epochs=None, max_seconds=90)
    lefts = re.findall(r"(\d:\d\d) left", terminal.getvalue())
    assert lefts[0] > "1:20" and lefts[-1] == "0:01"


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_an_epoch_has_the_same_number_on_a_terminal_and_over_a_pipe(
    terminal, second_a_step, caplog, is_terminal
):
    caplog.set_level("INFO", "dpframe")
    settings = {"callbacks": [second_a_step], "max_steps": 8, "data": Rows(20, 4)}
    if is_terminal:
        terminal.fitted(**settings)
    else:
        fitted(**settings | {"callbacks": [second_a_step, Progress(False)]})
    shown = terminal.bars() if is_terminal else messages(caplog)
    numbers = [re.match(r"epoch (\d/2)", line)[1] for line in shown]
    assert numbers[0] == "1/2" and numbers[-1] == "2/2"
    assert set(numbers) == {"1/2", "2/2"}


class Losses(Callback):
    """Of each step, over all rows of this process."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def on_batch_end(self, trainer, batch, outputs):
        pairs = zip([share.rows for share in batch.shares], outputs, strict=True)
        self.of_steps.append(sum(rows * float(out["loss"]) for rows, out in pairs) / batch.rows)


def interrupt(trainer):
    if trainer.global_step == 12:
        raise Interrupted(signal.SIGINT)


def stop(trainer):
    if trainer.global_step == 12:
        trainer.stop("enough")


@pytest.mark.parametrize("end", [stop, interrupt])
def test_a_run_that_ends_early_leaves_no_half_bar_and_no_time_left(terminal, second_a_step, end):
    ends = pytest.raises(Interrupted) if end is interrupt else nullcontext()
    with ends:
        terminal.fitted(callbacks=[second_a_step, Hooks(on_step_end=end)], **LONG)
    before, last = terminal.frames()[-3][-1], terminal.frames()[-1][-1]
    assert "━" in before and " left" in before
    assert re.match(r"epoch 1/4  4 samples/s  \S*loss \S+", last)
    assert not re.search("[━╸╺]| left", last)


@pytest.mark.parametrize(
    ("data", "left"),
    [(Rows(20, 4), r"epoch 1/1 ━{10} 4 "), (Streamed(40, 4, val=False), "epoch 1/1  step 10  4 ")],
    ids=["rows", "stream"],
)
def test_a_run_that_ends_as_it_was_to_leaves_a_whole_bar_where_its_length_is_known(
    terminal, second_a_step, data, left
):
    terminal.fitted(callbacks=[second_a_step], data=data, max_epochs=1)
    assert re.match(left, terminal.frames()[-1][-1])


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_bar_has_the_loss_of_the_newest_step_from_the_first_step_on(
    terminal, second_a_step, replicas
):
    losses = Losses()
    strategy = DataParallel(replicas, accelerator="cpu")
    with strategy:
        done = terminal.fitted(callbacks=[second_a_step, losses], strategy=strategy, **LONG)
    mean = done.metrics["train/loss"]
    shown = [re.findall(r"  (\S*loss) (\S+)", bar)[0] for bar in terminal.bars()]
    newest = [("loss", f"{loss:.4g}") for loss in losses.of_steps]
    assert shown[:20] == newest[:20]
    within = [each for each in shown if each[0] == "loss"]
    assert {*within} <= {*newest}
    assert {*shown[len(within) :]} == {("train/loss", f"{mean:.4g}")}, "it stays on screen"


def test_the_bar_has_a_loss_of_each_optimizer(terminal, second_a_step, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    terminal.fitted(make=Pair, callbacks=[second_a_step], **LONG)
    found = [re.findall(r"  (\S*loss) \S+", bar) for bar in terminal.bars()[:2]]
    assert found == [["critic/loss"], ["critic/loss", "generator/loss"]]


def test_a_loss_of_the_bar_counts_by_weight_and_a_step_without_a_row_has_none():
    newest = NewestLoss()
    assert newest.read({"": []}) == {}
    given = [(4, {"loss": torch.tensor(1.0), "weight": 3}), (4, {"loss": torch.tensor(5.0)})]
    assert newest.read({"": given}) == {"loss": (3 * 1.0 + 4 * 5.0) / 7}
    nothing = [(2, {"loss": torch.tensor(math.nan), "weight": torch.tensor(0.0)})]
    assert newest.read({"": nothing}) == {"loss": 23 / 7}, "that of the step before"


def test_a_long_epoch_has_a_line_every_few_seconds(second_a_step, caplog):
    caplog.set_level("INFO", "dpframe")
    fitted(callbacks=[second_a_step, Progress(False)], **LONG)
    lines = messages(caplog)
    assert [re.match(r"epoch (\S+)  step (\d+)", line).groups() for line in lines[:5]] == [
        ("1/4", "5"),
        ("1/4", "10"),
        ("1/4", "15"),
        ("1/4", "20"),
        ("1/4", "20"),
    ]
    assert re.fullmatch(r"epoch 1/4  step 5/80  4 samples/s  1:15 left  step/loss \S+", lines[0]), (
        lines[0]
    )
    assert lines[4].startswith("epoch 1/4  step 20  train/loss"), "this one is the epoch's own"
    assert lines[5].startswith("epoch 2/4  step 25/80")


def test_a_long_validation_has_a_line_every_few_seconds(monkeypatch, caplog):
    caplog.set_level("INFO", "dpframe")
    ticks = Hooks(on_validation_batch_end=Clock(monkeypatch).ticks(1.0))
    made = fitted(callbacks=[ticks, Progress(False)], **{**LONG, "max_epochs": 1})
    made.validate()
    of_fit = [f"epoch 1/1  step 20/20  validation batch {done}/20" for done in (5, 10, 15, 20)]
    lines = messages(caplog)
    assert lines[:4] == of_fit and lines[4].startswith("epoch 1/1  step 20  train/loss")
    assert lines[5:] == [f"validation batch {done}/20" for done in (5, 10, 15, 20)]


@pytest.mark.parametrize("mode, word", [("test", "test"), ("predict", "prediction")])
def test_a_long_test_or_prediction_has_a_line_every_few_seconds(monkeypatch, caplog, mode, word):
    caplog.set_level("INFO", "dpframe")
    ticks = Hooks(**{f"on_{mode}_batch_end": Clock(monkeypatch).ticks(1.0)})
    made = trainer(data=LONG["data"], callbacks=[ticks, Progress(False)])
    getattr(made, mode)()
    assert messages(caplog) == [f"{word} batch {done}/20" for done in (5, 10, 15, 20)]


def test_a_slow_terminal_takes_a_twenty_fifth_of_the_time(monkeypatch, terminal):
    clock = Clock(monkeypatch)
    draw, drawn = Progress._draw, []

    def slow(*parts: Any, **options: Any) -> None:
        draw(*parts, **options)
        clock.now += 0.1
        drawn.append(clock.now)

    monkeypatch.setattr(Progress, "_draw", slow)
    terminal.fitted(callbacks=[Hooks(on_step_end=clock.ticks(0.5))], **LONG)
    pauses = [later - earlier - 0.1 for earlier, later in pairwise(drawn[:-1])]
    assert len(pauses) > 10 and all(2.5 <= pause < 3.1 for pause in pauses)


def test_the_bar_shows_how_far_a_validation_is(terminal, monkeypatch):
    ticks = Hooks(on_validation_batch_end=Clock(monkeypatch).ticks(1.0))
    terminal.fitted(callbacks=[ticks], **LONG)
    pattern = r"epoch 1/4 [━╸╺ ]{10} validation batch (\d+)/20  loss"
    shown = [found[1] for bar in terminal.bars() if (found := re.match(pattern, bar))]
    assert shown == [str(done) for done in range(1, 21)]


def test_a_run_of_hours_has_a_line_a_minute(monkeypatch, caplog):
    caplog.set_level("INFO", "dpframe")
    five_seconds_a_step = Hooks(on_step_end=Clock(monkeypatch).ticks(5.0))
    data = Streamed(4 * 600, 4, val=False)
    fitted(callbacks=[five_seconds_a_step, Progress(False)], data=data, max_epochs=1)
    steps = [int(re.search(r"step (\d+)", line)[1]) for line in messages(caplog)]
    assert steps[:3] == [1, 2, 3]
    assert {b - a for a, b in pairwise(steps[-20:-1])} == {12}


def test_the_last_ten_epochs_and_the_best_stay_on_screen(terminal, second_a_step):
    scores = [5.0, 3.0, 1.0, *(2.0 + epoch / 10 for epoch in range(11))]
    watch = EarlyStopping(monitor="val/score", patience=50)
    callbacks = [second_a_step, watch]
    terminal.fitted(Scripted(scores), callbacks=callbacks, max_epochs=len(scores))
    table = [line.split() for line in terminal.frames()[-1] if "samples/s" not in line]
    rows = [row for row in table if row and row[0].isdigit()]
    assert table[0][:4] == ["epoch", "step", "train/loss", "val/score"]
    assert [int(row[0]) for row in rows] == [3, *range(5, 15)]
    assert [row[3] for row in rows[:2]] == ["1", "2.1"]
    assert [row[-1] == "best" for row in rows] == [True] + [False] * 10


def test_the_table_is_no_higher_than_the_terminal(terminal, second_a_step, monkeypatch):
    monkeypatch.setenv("LINES", "9")
    terminal.fitted(callbacks=[second_a_step, EarlyStopping()], max_epochs=12)
    assert max(map(len, terminal.frames())) <= 9
    assert "epoch 12/12" in terminal.frames()[-1][-1]


def test_the_best_of_a_resumed_run_may_be_one_from_before(terminal, second_a_step):
    def run(scores, epochs, resume=None):
        callbacks = [second_a_step, Best("val/score", "max", "")]
        task = Scripted(scores)
        return terminal.fitted(task, callbacks=callbacks, max_epochs=epochs, resume=resume)

    state = run([7.0, 3.0], 2).state_dict()
    terminal.truncate(0)
    run([4.0, 5.0], 4, state)
    rows = [line.split() for line in terminal.frames()[-1][1:3]]
    assert (rows[0][:2], rows[0][3], rows[0][-1]) == (["1", "5"], "7", "best")
    assert rows[1][0] == "3"


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_end_shows_all_metrics_of_the_best_epoch_beside_the_last(capsys, is_resumed):
    scores, state = [7.0, 3.0, 4.0], None
    if is_resumed:
        before = fitted(
            make=partial(Scripted, scores[:2]), callbacks=[Best("val/score", "max", "")]
        )
        state, scores = before.state_dict(), scores[2:]
    best = Best("val/score", "max", "")
    callbacks = [Progress(False), best]
    make = partial(Scripted, scores)
    last = fitted(make=make, callbacks=callbacks, max_epochs=3, resume=state).metrics
    assert best.metrics == fitted(make=partial(Scripted, [7.0]), max_epochs=1).metrics
    table = capsys.readouterr().out.partition("\nmetric ")[2].splitlines()
    assert re.split("  +", table[0].strip()) == ["best, step 5", "last, step 15"]
    shown = [line.split() for line in table[2 : 2 + len(last)]]
    assert shown == [[name, f"{best.metrics[name]:.6g}", f"{last[name]:.6g}"] for name in last]


def test_a_best_epoch_before_a_resume_has_no_line_among_those_of_this_run(caplog):
    caplog.set_level("INFO", "dpframe")

    def run(scores, epochs, resume=None):
        caplog.clear()
        callbacks = [Progress(False), Best("val/score", "max", "")]
        made = fitted(Scripted(scores), callbacks=callbacks, max_epochs=epochs, resume=resume)
        lines = [line for line in messages(caplog) if line.startswith("epoch")]
        return made.state_dict(), [line.split()[1] for line in lines]

    state, lines = run([3.0, 7.0, 4.0], 3)
    assert lines == ["1/3", "2/3", "3/3"]
    assert run([4.0, 5.0, 1.0], 6, state)[1] == ["4/6", "6/6"], "a short one has no line"


def test_of_a_best_step_within_an_epoch_the_end_shows_what_was_measured_there(capsys):
    best = Best("val/score", "max", "")
    task, within = Scripted([7.0, 9.0, 3.0, 4.0, 5.0]), {"validate_every_steps": 2}
    fitted(task, callbacks=[Progress(False), best], max_epochs=2, max_steps=8, **within)
    assert best.step == 4
    assert best.metrics.keys() == {"val/loss", "val/mae", "val/score"}
    assert re.search(r"\ntrain/loss +\S+ *\n", capsys.readouterr().out), "of the last epoch alone"


def test_where_the_last_epoch_is_the_best_the_end_shows_it_once(capsys):
    best = Best("val/score", "max", "")
    fitted(Scripted([1.0, 2.0]), callbacks=[Progress(False), best], max_epochs=2)
    assert "\nmetric      value\n" in capsys.readouterr().out


def test_what_is_judged_first_decides_what_is_best(tmp_path):
    callbacks = [Checkpoint("val/mae", keep=0), EarlyStopping("val/loss"), Progress()]
    progress = fitted(callbacks=callbacks, directory=tmp_path).callbacks[1]
    assert isinstance(progress, Progress) and progress.best.monitor.name == "val/loss"


@pytest.mark.parametrize("kind, has_bar", [("dumb", False), ("unknown", False), ("xterm", True)])
def test_a_terminal_that_can_not_go_back_gets_lines(terminal, monkeypatch, kind, has_bar):
    monkeypatch.setenv("TERM", kind)
    assert terminal.fitted().callbacks[0].has_bar is has_bar
    assert ("\x1b[" in terminal.getvalue()) is has_bar


def test_what_is_printed_or_logged_on_a_terminal_comes_above_the_bar(
    terminal, second_a_step, tmp_path
):
    from dpframe.modes.output import logging_to

    def speak(trainer):
        if trainer.global_step == 12:
            print("printed")
            logging.getLogger("mine").warning("logged")

    with redirect_stdout(terminal), logging_to(tmp_path, rank=0):
        terminal.fitted(callbacks=[second_a_step, Hooks(on_step_end=speak)], **LONG)
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    for said in ("printed", "warning: logged"):
        assert re.search(rf"(?:{MOVES}){said}\nepoch 1/4", plain), "else the bar overwrites it"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_the_best_and_warnings_in_a_colour_unless_no_color_is_set(
    terminal, second_a_step, tmp_path, monkeypatch, no_color
):
    from dpframe.modes.output import logging_to

    monkeypatch.setenv("NO_COLOR", no_color)
    best = Best("val/score", "max", "")
    with redirect_stdout(terminal), logging_to(tmp_path, rank=0):
        for level in (logging.WARNING, logging.INFO):
            logging.getLogger("dpframe").log(level, "said: \x1b[31mred")
    terminal.fitted(Scripted([7.0, 3.0]), callbacks=[second_a_step, best])
    out = terminal.getvalue()
    warning = "warning: " if no_color else "\x1b[33mwarning:\x1b[0m "
    assert out.startswith(f"{warning}said: \\x1b[31mred\nsaid: \\x1b[31mred\n")
    green = "" if no_color else "\x1b[32m"
    assert re.search(rf"\n{re.escape(green)} +1\D.*best", out), "the row of the best epoch"
    assert "\x1b[32m" not in re.findall(r"\n.* +2\D.*", out)[-1]
    assert "\x1b" not in (tmp_path / "run.log").read_text()


def test_the_line_of_a_notebook_has_the_same_number_and_a_loss_within_the_epoch(
    capsys, monkeypatch
):
    ticks = Hooks(on_step_end=Clock(monkeypatch).ticks(1.0))
    monkeypatch.setattr(live, "time", progress.time)
    fitted(callbacks=[ticks, Live()], **LONG)
    lines = capsys.readouterr().out.split("\r")
    assert lines[1].startswith("epoch 1/4  step 1/80  loss ")
    assert lines[5].startswith("epoch 1/4  step 5/80  loss ")
    assert lines[20].startswith("epoch 1/4  step 20/80  loss ")
