"""The benchmarks measure what they say, and tell what they measure."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.performance import changes, process, report, sections, step  # noqa: E402
from benchmarks.performance.process import Program, Run  # noqa: E402


def test_a_step_is_measured_beside_those_of_tuned_loops(tmp_path):
    """What it costs is no part of the suite: `python -m benchmarks.performance.step` prints it."""
    epochs = step.WARM_EPOCHS + 2
    assert min(step.ratios(tmp_path, epochs=epochs)) > 0
    assert step.of_names(3, epochs=epochs) > 0
    assert step.of_sets(2, epochs=epochs) > 0


def test_processes_take_turns_and_the_first_turn_is_thrown_away(tmp_path, monkeypatch):
    order = tmp_path / "order"
    programs = [Program(name, []) for name in "AB"]

    def run(program: Program) -> Run:
        with order.open("a") as file:
            file.write(program.name)
        return Run("AB".index(program.name))

    monkeypatch.setattr(process, "run", run)
    runs = process.in_turns(programs, 4)
    turns = textwrap.wrap(order.read_text(), 2)
    assert len(turns) == 5 and set(turns) == {"AB", "BA"}, "each in each turn, in either order"
    assert {name: [run.seconds for run in its] for name, its in runs.items()} == {
        "A": [0] * 4,
        "B": [1] * 4,
    }


MEASURES = """
import sys
from benchmarks.performance.sections import PROGRAMS, Program, run

tells = "from marks import Marks; m = Marks(); m.begin(); m.train(); m.end()"
tells += "; m.tell(loss=1.0, steps_per_epoch=1)"
for line in ("pass", "kept = b'x' * (200 << 20)"):
    command = [sys.executable, "-c", f"{line}; {tells}"]
    print(run(Program("", command, python_path=str(PROGRAMS))).megabytes)
assert "torch" not in sys.modules
"""


def test_peak_memory_is_the_processs_own():
    """From the runner's own process: what one starts is counted as large as itself at least."""
    command = [sys.executable, "-c", MEASURES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lean, large = map(float, done.stdout.splitlines())
    assert 180 < large - lean < 260


def test_a_step_is_read_from_the_marks_without_the_first_epochs():
    begun = [10.0 + epoch for epoch in range(20)]
    trained = [moment + (0.9 if epoch < 5 else 0.2) for epoch, moment in enumerate(begun)]
    told = {"begun": begun, "trained": trained, "ended": [b + 1.0 for b in begun]}
    told |= {"loss": 1.0, "steps_per_epoch": 4, "megabytes": 8.0}
    line = f"import os; open(os.environ['BENCHMARK_REPORT'], 'w').write({json.dumps(told)!r})"
    run = process.run(Program("", [sys.executable, "-c", line]))
    assert run.step == run.first_step == run.last_step == pytest.approx(0.2e6 / 4)
    assert run.epoch_step == pytest.approx(1e6 / 4)
    assert run.loss == 1.0


def test_a_program_that_fails_ends_the_benchmark_with_its_output():
    line = "import sys; sys.exit('no such thing')"
    with pytest.raises(SystemExit, match="ended with 1:\nno such thing"):
        process.run(Program("", [sys.executable, "-c", line]))


def test_a_peer_that_trains_something_else_is_no_peer():
    def check(loss: float) -> None:
        sections.check_losses({"dpframe": [Run(1, loss=7.0)], "peer": [Run(1, loss=loss)]})

    check(8.0)
    for loss in (16.0, float("nan")):
        with pytest.raises(SystemExit, match="do not train alike"):
            check(loss)


@pytest.mark.parametrize("times, is_met", [([1.0, 5.0, 1.0], True), ([2.0, 10.0, 2.1], False)])
def test_the_ratio_is_that_of_the_turns_and_meets_its_target_or_not(times, is_met):
    """The second turn was slow for both: the median of ratios is not moved by it."""
    ours, others = (list(map(Run, seconds)) for seconds in (times, (2.0, 10.0, 2.0)))
    result = report.compared("whole", "peer", ours, others, "seconds", 0.6)
    assert (result.is_met, result.ratio) == (is_met, 0.5 if is_met else 1.0)


def test_the_page_gets_its_tables_between_the_markers(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    parts = [f"<!-- begin: {name} -->\nold\n<!-- end: {name} -->\n" for name in "ab"]
    report.PAGE.write_text(f"before\n{''.join(parts)}after\n")
    peer = report.compared("a step", "peer", [Run(1, step=400)], [Run(1, step=1e3)], "step", 0.45)
    other = report.compared("all", "other", [Run(0.4), Run(0.6)], [Run(0.5)] * 2, "seconds", 0.5)
    report.write("b", report.tables([peer, other]))
    page = report.PAGE.read_text()
    assert page.startswith(f"before\n{parts[0]}") and page.endswith("\nafter\n")
    assert page.count("old") == 1
    assert "| peer | 400 us | 1,000 us | 0.40 | 0.40 to 0.40 | 0.45 | yes |" in page
    assert "| other | 0.50 s | 0.50 s | 1.00 | 0.80 to 1.20 | 0.50 | **no** |" in page


def test_each_section_has_its_place_on_the_page():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in [*sections.SECTIONS, "changes"]:
        assert page.count(f"<!-- begin: {name} -->") == page.count(f"<!-- end: {name} -->") == 1


def test_a_change_is_told_as_ratios_to_the_first_commit(monkeypatch):
    monkeypatch.setattr(changes, "subject", lambda commit: f"{commit} subject")
    kinds = ("boston", "mlp", "lenet", "ranks")
    runs = {f"a {k}": [Run(2.0, begin=1.0, step=10.0, epoch_step=20.0)] for k in kinds}
    runs |= {f"b {k}": [Run(3.0, begin=1.0, step=12.0, epoch_step=30.0)] for k in kinds}
    assert changes.table(["a", "b"], runs).splitlines()[2:] == [
        "| a subject | 20 us | 2.00 s | 1.00 s | 10 us | 10 us | 20 us | 2.00 s |",
        "| b subject | 1.50 | 1.50 | 1.00 | 1.20 | 1.20 | 1.50 | 1.50 |",
    ]
