"""What the README and the guides show is what happens."""

import json
import os
import re
import runpy
import shlex
import signal
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from itertools import groupby, product
from pathlib import Path

import pytest
import torch
from attempted import Attempt, attempted
from command import attempts, dpframe, write
from forked import fresh, started

from dpframe import Strategy, checkpoint
from dpframe.strategies.group import GroupCollectives

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
EXAMPLES = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("examples/*/README.md"))]

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def files_of(page: str) -> dict[str, str]:
    """The blocks below a line that shows their path, by their paths."""
    found = re.findall(r"^`(\S+)`:\n```\w+\n(.*?)^```$", text_of(page), re.S | re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


def commands_of(page: str) -> list[str]:
    """Every `dpframe …` line of a bash or console block, and of torchrun the same."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)^```$", text_of(page), re.S | re.M)
    lines = [re.split(" [#|] ", line)[0] for block in blocks for line in block.splitlines()]
    found = [re.search(r"^(?:\$ )?(?:.*-m )?dpframe (.*)", line) for line in lines]
    return [match[1].strip() for match in found if match]


def refused(page: str) -> dict[str, str]:
    """The commands that a page shows with their error."""
    return dict(re.findall(r"^ *\$ dpframe (.*)\n *(dpframe: .*)$", text_of(page), re.M))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the pages show, and runs with checkpoints."""
    folder = tmp_path_factory.mktemp("written")
    for page in PAGES:
        write(folder, files_of(page))
    for recipe, name in product(("boston", "gpt", "lenet", "letters", "lines"), ("best", "last")):
        checkpoint.save({"task": {}}, folder / f"outputs/{recipe}/1/checkpoints/{name}.ckpt")
        write(folder, {f"outputs/{recipe}/1/.hydra/overrides.yaml": f"- recipe={recipe}\n"})
    (folder / "theirs.pt").touch()
    return folder


@pytest.mark.whole
def test_every_test_that_a_page_names_is_there():
    """In a comment beside what it shows, and not at the start of a line: that ends a paragraph."""
    files = [path.read_text() for path in ROOT.glob("tests/**/test_*.py")]
    tests = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.M)}
    named = {
        page: {*" ".join(re.findall(r"<!-- (test_[\w ]+) -->", text_of(page))).split()}
        for page in PAGES
    }
    assert {page: lost for page, names in named.items() if (lost := names - tests)} == {}
    assert [page for page in PAGES if re.search(r"^ *<!-- test_", text_of(page), re.M)] == []
    assert len(set.union(*named.values())) >= 150


# Members of a strategy that are the Trainer's, or the base class's own.
NOT_WRITTEN = {"name", "nodes", "uses_gpus", "choose_devices", "is_set_up"}


def test_the_contract_of_a_strategy_names_each_member_and_each_collective():
    members = {name for name in vars(Strategy) if not name.startswith("_")} - NOT_WRITTEN
    collectives = {n for n, m in vars(GroupCollectives).items() if callable(m) and n[0] != "_"}
    page = text_of("docs/strategies.md")
    contract = page.partition("## The contract")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:self\.|strategy\.)?(\w+)", contract))
    assert members | collectives <= named, (members | collectives) - named
    assert len(contract.splitlines()) <= 60


def test_the_two_commands_of_continuous_integration_are_there():
    """`.ci/run` takes the first and the second line that begin like this."""
    lines = re.findall(r"^pip install .*&&.*$", text_of("README.md"), re.M)
    assert lines == [
        "pip install -c constraints.txt -e . && python -m dpframe recipe=boston",
        "pip install -c constraints.txt -e '.[dev]' && python -m pytest",
    ]


def test_the_first_screen_has_the_same_number_on_any_replicas_and_after_a_kill(tmp_path):
    _, block = re.findall(r"```(bash|console)\n(.*?)^```$", text_of("README.md"), re.S | re.M)[1]
    done = [re.sub(r" [|>].*", "", line[2:]) for line in block.splitlines() if line[0] == "$"]
    numbers = {line for line in block.splitlines() if line.startswith("val/loss ")}
    assert len(done) == 6 and len(numbers) == 1
    for words in map(shlex.split, done):
        line = words[words.index("dpframe") + 1 :]
        if words[0] == "timeout":
            with started([*line, "hydra.run.dir=outputs/boston/killed"], tmp_path) as job:
                job.wait_for("outputs/boston/killed/checkpoints/last.ckpt")
                os.kill(job.pid, signal.SIGKILL)
                job.wait()
        else:
            printed = dpframe(*line, cwd=tmp_path).stdout
            assert numbers <= {*printed.splitlines()}, printed
    assert "resume=last is outputs/boston/killed/" in printed and "\nresumed at epoch " in printed


# Commands with what they have after them here, and what they should print.
SHOWN = {
    "recipe=boston": ("", r"^best +epoch \d+, step \d+: val/loss 13\.51"),
    "recipe=boston mode=test checkpoint=best": ("", r"^test/loss +\d"),
    "--config-dir mine recipe=boston strategy=half trainer.gpus=2": (
        "trainer.max_epochs=2 trainer.accelerator=cpu",
        r"^strategy +Half on 2 x cpu$",
    ),
    "--config-dir mine recipe=letters": (
        "",
        r"^epoch 1/\d+  step 60  train/loss \d.*val/loss [12]\.\d+",
    ),
    "--config-dir mine recipe=lines": ("", r"^step +batch 32 = 1 replica x 32$"),
    "--config-dir mine recipe=points": ("", r"^step +batch 32 = 1 replica x 32$"),
    "--config-dir mine recipe=points data._target_=mine.split.SplitData data.held_out=0.3": (
        "",
        r"^data +70 rows by __getitems__",
    ),
    "--config-dir mine recipe=points data._target_=mine.ready.ReadyData": (
        "",
        r"^step +batch 40 = 1 replica x 40$",
    ),
    "--config-dir mine recipe=points data._target_=mine.own_batches.OwnBatches strategy=ddp "
    "trainer.gpus=2": (
        "trainer.accelerator=cpu",
        r"^step +a ready batch of each of 2 ranks$",
    ),
    "--config-dir mine recipe=shards strategy=ddp trainer.gpus=2": (
        "trainer.accelerator=cpu",
        r"^data +a stream of 8 shards, divided over 2 ranks x 2 workers: which rows meet",
    ),
    "--config-dir mine recipe=boston callbacks=stop_below": (
        "trainer.max_epochs=40",
        r"^stopped: val/mae=2\.\d+ is below 3\.0$",
    ),
    "--config-dir mine recipe=boston callbacks=score": (
        "trainer.max_epochs=2",
        r"^epoch 2/2 .* val/score [\d.]+( .*)?$",
    ),
    "--config-dir mine recipe=boston callbacks=worst_rows": (
        "trainer.max_epochs=2",
        r"^recipe +boston",
    ),
    "--config-dir mine recipe=boston task._target_=mine.ranked.Ranked "
    "callbacks.checkpoint.monitor=val/spearman callbacks.checkpoint.mode=max": (
        "trainer.max_epochs=2",
        r"^epoch 2/2 .* val/spearman -?[\d.]+  val/mape [\d.]+  val/r2 -?[\d.]+$",
    ),
    "--config-dir mine recipe=prices callbacks.checkpoint.monitor=val/score "
    "trainer.clip_norm={critic:1.0} task.optimizers.critic.lr=0.002": (
        "trainer.max_epochs=2",
        r"^epoch 2/2  step 14  train/critic/loss .*train/generator/loss",
    ),
    "--config-dir mine recipe=halves strategy=data_parallel trainer.gpus=3": (
        "trainer.max_epochs=2",
        r"^step +batch 64 = 22 \+ 22 \+ 20$",
    ),
    "--config-dir mine recipe=tuned checkpoint=outputs/boston/…/checkpoints/best.ckpt "
    "checkpoint_skip=[net.4]": (
        "trainer.max_epochs=12",
        r"^step 40: net\.0 is thawed$",
    ),
    "--config-dir mine recipe=boston +callbacks.sam._target_=mine.sam.SAM": (
        "trainer.max_epochs=2",
        r"^recipe +boston",
    ),
    "--config-dir mine recipe=boston task/schedule=triangle task.schedule.top=0.2": (
        "trainer.max_epochs=2",
        r"^task.schedule: Triangle\(top=0.2\), 8 steps in all$",
    ),
    "--config-dir mine recipe=risen": ("trainer.max_epochs=2", r"^recipe +risen"),
    "--config-dir mine recipe=boston logger=json_lines": (
        "trainer.max_epochs=2",
        r"^recipe +boston",
    ),
}


# What other commands have after them, so that each takes less than a second.
SHORT = "trainer.max_epochs=1 trainer.limit_train_batches=2 trainer.limit_val_batches=1"
SHORT += " trainer.share_check=off data.batch_size=16"
AS_SHOWN = r"--(help|cfg)|resume=|(^| )mode="
# What other tests run: these take longer, or need what is not here.
ELSEWHERE = "|".join(
    [
        r"\bddp\b|strategy=(fsdp|ray)|sweep\.jobs|gpus=\[",  # ranks, GPUs
        r"mode=(compare|doctor|export|tune|verify)|hydra/(sweeper|launcher)|hydra\.sweep\.dir",
        r"trainer\.compile|logical_replicas|recipe=gpt|experiment=gpt|huggingface|my\.LitModel",
        r"recipe=(sft|classify)",
        r"sweep\.resume|outputs/(gpt|transfer)|data\.folder=trips|boston trainer\.precision=64$",
        r"=(https|s3)://",
    ]
)
HOUSES = "CRIM,ZN,INDUS,CHAS,NOX,RM,AGE,DIS,RAD,TAX,PTRATIO,B,LSTAT\n" + "1," * 12 + "1\n"


def lines_to_run(page: str) -> list[str]:
    """Each on the first page that has it."""
    done = {line for earlier in PAGES[: PAGES.index(page)] for line in commands_of(earlier)}
    done |= refused(page).keys()
    lines = [line for line in dict.fromkeys(commands_of(page)) if line not in done]
    return [line for line in lines if line in SHOWN or not re.search(ELSEWHERE, line)]


# Those of docs/from-the-tutorials.md have a file of their own.
RUN = [page for page in PAGES if lines_to_run(page) and "tutorials" not in page]


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_one_after_another(tmp_path, page):
    """In one process, but for those with ranks, which are forked where nothing was computed."""
    write(tmp_path, {name: text for each in PAGES for name, text in files_of(each).items()})
    write(tmp_path, {"houses.csv": HOUSES})
    first = "recipe=boston data.workers=0"  # for `checkpoint=best` and `resume=last`
    for is_ranked, lines in groupby([first, *lines_to_run(page)], has_ranks):
        words = {line: words_of(line) for line in lines}
        run = ranked if is_ranked else in_turn
        for line, done in zip(words, run(list(words.values()), tmp_path), strict=True):
            assert done.code in (0, None), f"{line}: {done.err}"
            assert line not in SHOWN or re.search(SHOWN[line][1], done.out, re.M), done.out
    if page == "docs/loggers.md":
        assert len(list(tmp_path.glob("outputs/boston/*/tables/val_worst-step*.csv"))) == 2
        (rows,) = tmp_path.glob("outputs/boston/*/measured.jsonl")
        assert [json.loads(row)["step"] for row in rows.read_text().splitlines()][:2] == [4, 8]


def words_of(line: str) -> list[str]:
    shorter = "" if re.search(AS_SHOWN, line) else SHORT
    return [*shlex.split(line), *SHOWN.get(line, [shorter])[0].split()]


def has_ranks(line: str) -> bool:
    return re.search("strategy=(ddp|half)", line) is not None


def ranked(lines: list[list[str]], folder: Path) -> list[Attempt]:
    done = [dpframe(*line, cwd=folder) for line in lines]
    return [Attempt(each.returncode, each.stdout, each.stderr, []) for each in done]


def in_turn(lines: list[list[str]], folder: Path) -> list[Attempt]:
    return fresh(attempted_by_newest, lines, folder=folder)


def attempted_by_newest(lines: list[list[str]]) -> list[Attempt]:
    return [each for line in lines for each in attempted([list(map(newest, line))])]


def newest(word: str) -> str:
    """With … as what there is; the last one by its name."""
    key, _, path = word.partition("=")
    return f"{key}={max(map(str, Path().glob(path.replace('…', '*'))))}" if "…" in word else word


def test_every_config_that_is_shown_is_in_a_command_that_is_run():
    configs = [Path(name) for page in PAGES for name in files_of(page) if name.endswith(".yaml")]
    run = {line for page in RUN for line in lines_to_run(page)}
    options = {word for line in run for word in line.split()}
    groups = {path: "/".join(path.parent.parts[1:]) for path in configs}  # below mine/
    assert {f"{group}={path.stem}" for path, group in groups.items()} <= options
    assert SHOWN.keys() <= run


def test_the_script_prints_what_its_recipe_learns(written):
    printed = fresh(printed_by, "script/train.py", folder=written)
    assert re.search(r"^step 60: loss [12]\.\d+$", printed, re.M), printed
    line = "--config-dir mine recipe=letters mode=validate checkpoint=ckpt.pt"
    (taken,) = attempts([line.split()], written)  # of its step 40
    assert taken.code == 0, taken.err
    assert re.search(r"^val/loss +[12]\.\d+$", taken.out, re.M), taken.out


def printed_by(script: str) -> str:
    torch.set_num_threads(1)  # more are slower for such a network
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.whole
def test_every_command_that_is_shown_composes(written):
    shown = {line: refused(page).get(line) for page in PAGES for line in commands_of(page)}
    # These are no run's, of a plugin of Hydra's, or of the network: test_sweep_resume, test_optuna,
    # test_slurm, test_ray and test_address have their like.
    others = "sweep.resume=|hydra/(sweeper|launcher)=|=(https|s3)://"
    shown = {line: refusal for line, refusal in shown.items() if not re.search(others, line)}
    lines = [
        [word.split(",")[0] if is_sweep(word) else word for word in shlex.split(line)]
        for line in shown
    ]
    lines = [[w.replace("…", "1") for w in line if w != "-m"] + ["-c", "job"] for line in lines]
    for (line, refusal), run in zip(shown.items(), attempts(lines, written), strict=True):
        if refusal:
            assert (run.code, run.err.rstrip()) == (2, refusal)
        else:
            assert run.code == 0, f"{line}: {run.err}"


def test_sweeps_print_what_their_page_shows(tmp_path):
    """But for the digits: they are this machine's."""
    blocks = re.findall(r"^\$ dpframe (-m .*)\n([^`]*)", text_of("docs/sweeps.md"), re.M)
    lines = [shlex.split(line) for line, _ in blocks]
    done = attempts(lines, tmp_path)
    assert len(lines) == 4 and [each.code for each in done] == [0] * 4, done
    for (_, shown), each in zip(blocks, done, strict=True):
        cut, end = shown.startswith("…\n"), without_digits(shown.removeprefix("…\n"))
        assert not shown or without_digits(each.out)[-len(end) if cut else 0 :] == end
    names = {"multirun.yaml", "sweep.csv", "sweep.json", "sweep.svg"}
    assert names <= {path.name for path in (tmp_path / "rates").iterdir()}
    for name in names:
        assert f"| `{name}` |" in text_of("docs/sweeps.md")


def without_digits(text: str) -> list[str]:
    """Numbers with a point as one #; columns may be wider for it."""
    return [re.sub(r" +", " ", re.sub(r"\d+\.\d+|-{3,}", "#", line)) for line in text.splitlines()]


def is_sweep(word: str) -> bool:
    return "=" in word and not {"[", "{"} & {*word}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_programs_files_and_extras_that_are_shown_are_there(page):
    """Programs, e.g. `python -m benchmarks.gpu`, have tests of their own."""
    text = text_of(page)
    for name in re.findall(r"python (?:-m )?((?:benchmarks|dpframe\.recipes)[./][\w./]+\b)", text):
        path = ROOT / name.removeprefix("dpframe.").removesuffix(".py").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for name in re.findall(r"(?<![\w/.])(?:examples|tests|notebooks|docs)/[\w./-]*\w", text):
        assert (ROOT / name).exists(), name
    assert set(re.findall(r"dpframe\[(\w+)\]", text)) <= EXTRAS.keys()


def test_the_readme_is_a_screen_and_some():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


def test_the_readme_shows_commands_and_a_mistake():
    """So that the test above can't pass over nothing."""
    assert len(commands_of("README.md")) >= 9
    assert len(refused("README.md")) == 1


def test_files_that_are_shown_agree():
    """A path means the same text on every page."""
    seen: dict[str, str] = {}
    for page in PAGES:
        for name, text in files_of(page).items():
            assert seen.setdefault(name, text) == text, f"{name} in {page}"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    near = [link.partition("#")[0] for link in links if not re.match(r"https?://|#|mailto:", link)]
    missing = [link for link in near if not ((ROOT / page).parent / link).exists()]
    assert not missing
