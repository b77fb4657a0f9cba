"""The example plugin, installed as a user would, in an environment and a folder of its own."""

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "dpframe-localsgd"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The Python of an environment that has the plugin, and all that this one has."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    here = sysconfig.get_path("purelib")
    there = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at=folder)
    Path(there.strip(), "all_of_ours.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    source = shutil.copytree(EXAMPLE, folder / "source")  # pip builds where the source is
    offline = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(python, "-m", "pip", "install", *offline, source, at=folder)
    shutil.move(source / "tests", folder / "tests")
    shutil.rmtree(source)
    return python


def run(python: Path, *words: object, at: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [python, *map(str, words)]
    ended = subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def dpframe(python: Path, *words: str, at: Path) -> str:
    return run(python, "-m", "dpframe", *words, at=at)


def test_its_own_tests_pass_where_it_is_installed(installed, tmp_path):
    tests = installed.parents[2] / "tests"
    output = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, at=tmp_path)
    assert re.search(r"^\d\d passed", output, re.M), output


def test_it_is_an_option_like_any_other(installed, tmp_path):
    page = dpframe(installed, "--help", at=tmp_path)
    assert re.search(r"strategy=localsgd +\S.+ \(dpframe-localsgd 0\.1\.0\)\n", page)


def test_a_plain_average_after_every_update_prints_what_ddp_prints(installed, tmp_path):
    sgd = ("task.optimizer._target_=torch.optim.SGD", "task.optimizer.lr=0.001")
    words = ("recipe=boston", *sgd, "trainer.max_epochs=3", "trainer.gpus=2")
    plain = ("inner_steps=1", "outer_learning_rate=1", "outer_momentum=0")
    double = "trainer.precision=64"
    ddp = dpframe(installed, *words, double, "strategy=ddp", at=tmp_path)
    chosen = ("strategy=localsgd", *(f"strategy.{setting}" for setting in plain))
    local = dpframe(installed, *words, double, *chosen, at=tmp_path)
    assert epochs(local) == epochs(ddp)
    assert "sent 76,896 bytes a rank in 12 rounds; ddp's gradients are 76,896" in local


def epochs(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3
    return lines


def test_fewer_rounds_send_less_and_learn(installed, tmp_path):
    words = ("recipe=boston", "trainer.gpus=2", "trainer.max_epochs=60", "strategy=localsgd")
    rare = ("trainer.validate_every_epochs=20", "callbacks.checkpoint.every_n_epochs=20")
    steps = "strategy.inner_steps=20"
    output = dpframe(installed, *words, *rare, steps, "hydra.run.dir=run", at=tmp_path)
    assert "sent 38,448 bytes a rank in 12 rounds; ddp's gradients are 768,960, 20 times" in output
    assert float(re.findall(r"^val/rmse +([\d.]+)", output, re.M)[0]) < 8
    checkpoint = "checkpoint=run/checkpoints/last.ckpt"
    test = ("recipe=boston", "strategy=cpu", "mode=test", checkpoint)
    tested = dpframe(installed, *test, at=tmp_path)
    numbers = [re.search(rf"^{name} +(\S+)", text, re.M)[1] for name, text in
               (("val/loss", output), ("test/loss", tested))]  # fmt: skip
    assert numbers[0] == numbers[1]  # one process has the weights that the ranks ended with


def test_what_its_readme_shows_is_what_it_prints(installed, tmp_path):
    shown = re.findall(r"^\$ dpframe (.*)\n(.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    ((words, line),) = shown
    assert line in dpframe(installed, *words.split(), at=tmp_path).splitlines()
