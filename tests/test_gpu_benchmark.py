"""The benchmark of GPUs: its formulas, its budget, its page, and a dry run of all of it."""

import gzip
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.gpu import __main__ as program  # noqa: E402
from benchmarks.gpu import budget, formulas, results, ways  # noqa: E402
from benchmarks.gpu.contests import LIGHTNING, RESIDENT, TUNED, contests, flops_per_row  # noqa: E402
from benchmarks.gpu.contests import recipe as problem_of  # noqa: E402
from benchmarks.gpu.page import page  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402
from benchmarks.gpu.resnet import ResNet50  # noqa: E402
from benchmarks.gpu.sections import SECTIONS, kernels, outcome  # noqa: E402

CPU = torch.device("cpu")


# Formulas


def test_the_operations_of_a_token_are_those_counted_by_hand():
    """Two products a parameter forward and four backward; of attention two products of 64 numbers
    for each of 1024 places, 12 heads and 12 layers, and as many twice backward."""
    by_hand = 6 * 124_439_808 + 3 * 2 * 2 * (64 * 1024) * 12 * 12
    assert formulas.flops_per_token(124_439_808, 12, 12, 768, 1024) == by_hand == 859_885_056


def test_utilization_is_of_the_peak_of_the_gpu():
    assert formulas.utilization(989e12, 2.0, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert formulas.utilization(756e12, 1.0, "NVIDIA H100 PCIe") == pytest.approx(1.0)
    assert formulas.peak_flops("NVIDIA H200") == 989e12
    assert formulas.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for unknown in ("FAKE", "", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert formulas.utilization(1e12, 1.0, unknown) is None


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ([(0, 10)], 0.0),
        ([(0, 2), (4, 6), (8, 10)], 0.4),
        ([(8, 10), (0, 5), (1, 2), (3, 6)], 0.2),  # out of order, within another, overlapping
        ([(3, 3)], None),
        ([], None),
    ],
)
def test_idle_is_what_no_kernel_covers(busy, idle):
    assert formulas.idle_share(busy) == (idle if idle is None else pytest.approx(idle))


def test_a_gpu_works_in_kernels_and_copies_and_in_nothing_else_of_a_trace(tmp_path):
    kinds = {"kernel": 0, "gpu_memcpy": 10, "gpu_memset": 20, "cpu_op": 30, "cuda_runtime": 40}
    events = [{"cat": kind, "ts": begin, "dur": 5} for kind, begin in kinds.items()]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"name": "no category", "ts": 50}, *events]}, file)
    assert kernels(tmp_path / "trace.json.gz") == [(0, 5), (10, 15), (20, 25)]


def test_curves_differ_by_their_largest_distance():
    assert formulas.largest_difference([4.0, 2.0], [4.0, 1.0]) == 0.25
    assert formulas.largest_difference([4.0], [4.0, 1.0]) is None
    assert formulas.largest_difference([], []) is None


def test_the_experiment_is_gpt_2_and_resnet_50_has_its_parameters():
    with torch.device("meta"):
        gpt = problem_of("experiment=gpt2_124m")
        resnet = ResNet50(torch.optim.SGD)
    assert sum(p.numel() for p in gpt.task.parameters()) == 124_439_808
    assert gpt.task.net.tokens.weight.shape == (50257, 768)
    assert flops_per_row(gpt) == 1024 * 859_885_056
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032


# The ways


@pytest.mark.parametrize("name", ["boston", "lenet", "gpt", "resnet"])
def test_the_tuned_loop_and_dpframe_train_the_same_thing(name):
    contest = contests(is_tiny=True)[name]
    hand, ours = (way(contest, CPU) for way in (ways.tuned, ways.ours))
    assert len(hand.losses) == 3 and hand.losses[2] < hand.losses[0]
    assert ours.losses == pytest.approx(hand.losses, rel=1e-5)
    assert hand.step_seconds > 0 and ours.step_seconds > 0


def test_a_way_that_trains_something_else_is_told():
    contest = contests(is_tiny=True)["boston"]
    hand = ways.tuned(contest, CPU)
    longer = replace(contest, make=lambda: with_rate(contest.make(), 1.0))
    found = told({TUNED: [ways.tuned(longer, CPU)], ways.OURS: [hand]}, tolerance=0.02)
    assert results.problems_of(found) == ["the tuned loop does not train the same thing"]
    assert "**the tuned loop does not train the same thing**" in page(report(found))


def with_rate(problem, rate):
    problem.task.make_optimizer = lambda weights: torch.optim.Adam(weights, lr=rate)
    return problem


# Results


def told(turns, **given):
    """What a contest with these turns is told as."""
    contest = {
        "kind": "contest",
        "name": "gpt",
        "title": "GPT",
        "unit": "tokens",
        "units_per_step": 1000,
        "flops_per_step": 989e12,
        "parameters": 5,
        "tolerance": 0.02,
        "aims": {},
        "least_utilization": None,
        "gpu": "NVIDIA H200",
        **given,
    }
    records = [
        {"kind": "turn", "contest": "gpt", "way": way, "number": number, **turn._asdict()}
        for way, its in turns.items()
        for number, turn in enumerate(its)
    ]
    records.append({"kind": "failure", "contest": "gpt", "way": LIGHTNING, "text": "out of memory"})
    [found] = results.contests_of([contest, *(records if given.get("fails") else records[:-1])])
    return found


def report(contest, *sections):
    its = {"kind": "contest", "name": contest["name"]}
    sections = [*sections, section("gpt", "done", [its])]
    return {
        "title": "A report",
        "when": "today",
        "command": "python",
        "seconds": 5.0,
        "problems": results.problems(sections, [contest]),
        "contests": [contest],
        "sections": sections,
    }


def section(name, state, records=(), error=""):
    told = {"seconds": 1.0, "limit": 2.0, "records": list(records), "error": error}
    return {"name": name, "state": state, **told}


def turns(*seconds, losses=(2.0, 1.0), peak=3 * 2**30):
    return [ways.Turn(each, peak, list(losses)) for each in seconds]


def test_a_contest_is_told_by_medians_and_by_ratios_turn_by_turn():
    found = told({TUNED: turns(1.0, 2.0, 8.0), ways.OURS: turns(2.0, 3.0, 4.0)})
    mine = found["ways"][1]
    assert (mine["way"], mine["step_seconds"], mine["units_per_second"]) == ("dpframe", 3, 1000 / 3)
    assert mine["utilization"] == pytest.approx(1 / 3)
    [ratio] = found["ratios"]
    assert (ratio["ratio"], ratio["low"], ratio["high"]) == (1.5, 0.5, 2.0)
    text = page(report(found))
    assert (
        "| dpframe | 3,000.000 | 2,000.000 to 4,000.000 | 333 | 33.3% | 3.00 GiB | 0.00% |" in text
    )
    assert results.problems_of(found) == []


def test_what_is_missed_or_fails_is_a_problem():
    given = {TUNED: turns(1.0), ways.OURS: turns(2.0), RESIDENT: turns(4.0)}
    aims = {TUNED: 1.01, RESIDENT: 0.97}
    found = told(given, aims=aims, least_utilization=0.6, fails=True)
    assert results.problems_of(found) == [
        "Lightning failed: out of memory",
        "MFU 0.50, not 0.60",
        "2.000 of the tuned loop, not 1.01",
    ]
    assert "**Lightning failed**: out of memory" in page(report(found))


def test_a_gpu_without_a_known_peak_has_no_mfu_and_the_page_says_so():
    found = told({ways.OURS: turns(2.0)}, gpu="NVIDIA H900")
    assert "No MFU: the peak of NVIDIA H900 is not in dpframe/devices/peaks.py." in page(
        report(found)
    )


def test_tests_that_fail_or_are_stopped_are_problems():
    xml = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
    <testcase name="a"/><testcase name="b"><failure message="assert 1 == 2&#10; more"/></testcase>
    <testcase name="c"><error message="RuntimeError: x"/></testcase><testcase name="d"/>
    </testsuite></testsuites>"""
    counts, failures = outcome(xml)
    assert counts == {"passed": 1, "failures": 1, "errors": 1, "skipped": 1}
    assert failures == ["b: assert 1 == 2", "c: RuntimeError: x"]
    record = {"kind": "test", "counts": counts, "failures": failures, "is_whole": False}
    text = page(report(told({ways.OURS: turns(1.0)}), section("tests", "done", [record])))
    assert "- tests: 2 failed\n- tests: stopped before their end\n" in text
    assert "- b: assert 1 == 2\n- c: RuntimeError: x\n" in text


# The budget

PROGRAMS = {
    "machine": "import sys; sys.exit('this is what went wrong')",
    "small": "from benchmarks.gpu.records import Records; import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "Records(pathlib.Path(sys.argv[1])).fact('child', child.pid)\n"
    "time.sleep(600)",
    "gpt": "from benchmarks.gpu.records import Records; import pathlib, sys\n"
    "Records(pathlib.Path(sys.argv[1])).fact('seen', 1)",
}


class Impatient(subprocess.Popen):
    """The time of a program that hangs is over as soon as it has told something."""

    def wait(self, timeout: float | None = None) -> int:
        records = Path(self.args[-1])
        if timeout is None or PROGRAMS["small"] not in self.args:
            return super().wait(timeout)
        while not (records.exists() and records.read_text().endswith("\n")):
            assert self.poll() is None
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_a_section_that_fails_or_hangs_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    monkeypatch.setattr(budget, "PARTS", {"machine": 4, "small": 1, "gpt": 20})

    def command(name, seconds, records):
        return [sys.executable, "-c", PROGRAMS[name], str(records)]

    failed, stopped, done = budget.run_all(list(PROGRAMS), 5000.0, command, tmp_path)
    assert [each.state for each in (failed, stopped, done)] == ["failed", "stopped", "done"]
    assert failed.error == "this is what went wrong"
    assert [record["name"] for record in done.records] == ["seen"]
    [child] = stopped.records  # what was measured is kept, and nothing is left behind
    assert is_gone(child["value"])
    sections = [each.as_json() for each in (failed, stopped, done)]
    assert results.problems(sections, []) == ["machine: failed", "small: stopped"]
    text = page(report(told({ways.OURS: turns(1.0)}), *sections))
    assert "It failed after" in text and "this is what went wrong" in text
    assert "Its time was over after" in text


def is_gone(process: int) -> bool:
    """Or about to be, when its parent has seen it end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{process}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_the_budget_has_no_time_for_is_told(tmp_path):
    def command(name, seconds, records):
        raise AssertionError(name)

    outcomes = budget.run_all(["machine", "gpt"], 0.0, command, tmp_path)
    assert [each.state for each in outcomes] == ["left out", "left out"]
    sections = [each.as_json() for each in outcomes]
    assert results.problems(sections, []) == ["machine: left out", "gpt: left out"]
    found = report(told({ways.OURS: turns(1.0)}), *sections)
    assert "Left out: the time was over." in page(found)


def test_a_line_that_was_cut_is_no_record(tmp_path):
    path = tmp_path / "records"
    Records(path).fact("one", 1.0)
    with path.open("a") as file:
        file.write('{"kind": "fa')
    assert [record["name"] for record in Records(path).read()] == ["one"]
    assert Records(tmp_path / "none").read() == []


# All of it


def test_without_a_gpu_it_says_how_to_try_it_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path / "out")])
    assert program.main() == 2
    line = (
        "python -m benchmarks.gpu needs a CUDA device, and there is none; "
        "use --dry-run --device cpu to try it out\n"
    )
    assert capsys.readouterr() == ("", line)
    assert not (tmp_path / "out").exists()


PARTS = [["machine", "tests", "small"], ["gpt", "resnet", "running"], ["ddp"]]  # in short tests
CONTESTS = {"small": ["boston", "lenet"], "gpt": ["gpt"], "resnet": ["resnet"]}
FACTS = {
    "machine": ["torch"],
    "running": ["idle share", "whole process", "a checkpoint"],
    "ddp": ["by ddp"],
}


def test_without_a_choice_all_sections_are_measured_and_each_is_tried_in_a_dry_run():
    assert program.parser().parse_args([]).only is None
    assert list(budget.PARTS) == list(SECTIONS) == sum(PARTS, [])


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        ("cpu", ["machine", "small"]),
        *(pytest.param("cuda", parts, marks=pytest.mark.gpu(2)) for parts in PARTS),
    ],
)
def test_a_dry_run_measures_what_is_asked_for_and_writes_the_page(tmp_path, device, parts):
    words = ["--device", device, "--only", *parts]
    # A busy machine takes its time: no section is to be stopped.
    done = benchmark("--dry-run", *words, "--out", tmp_path, "--minutes", 100)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu.md").read_text()
    assert set(report) == {
        *("title", "when", "command", "minutes", "seconds"),
        *("problems", "contests", "sections"),
    }
    assert report["problems"] == []
    states = {section["name"]: section["state"] for section in report["sections"]}
    assert states == dict.fromkeys(parts, "done")
    names = [c["name"] for c in report["contests"]]
    assert names == [name for part in parts for name in CONTESTS.get(part, [])]
    for contest in report["contests"]:
        rows = {way["way"]: way for way in contest["ways"]}
        assert {TUNED, ways.OURS} <= set(rows) <= {TUNED, ways.OURS, LIGHTNING, RESIDENT}
        assert all(way["agrees"] and way["step_seconds"] > 0 for way in rows.values())
        assert contest["ratios"] and contest["failures"] == []
    facts = [r["name"] for s in report["sections"] for r in s["records"] if r["kind"] == "fact"]
    for word in [word for part in parts for word in FACTS.get(part, [])]:
        assert any(word in name for name in facts), word
    text = (tmp_path / "gpu.md").read_text()
    assert text == page(report)
    assert text.startswith("# dpframe on a GPU, a dry run: its times mean nothing\n")
    assert all(f"## {name}\n" in text for name in parts)


def benchmark(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
