"""The example plugin, installed as a user would, in an environment and a folder of its own."""

import re
import shutil

import pytest
from command import ROOT, Environment

EXAMPLE = ROOT / "examples" / "dpframe-localsgd"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Environment:
    """It has the plugin, dpframe from the repository, and what is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    environment = Environment(folder / "venv")
    source = shutil.copytree(EXAMPLE, folder / "source")  # pip builds where the source is
    environment.install(source)
    (environment.packages / "dpframe.pth").write_text(f"{ROOT}\n")
    return environment


def test_its_own_tests_pass_where_it_is_installed(installed, tmp_path):
    tests = shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    output = installed("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tmp_path)
    assert re.search(r"^\d\d passed", output, re.M), output


def test_it_is_an_option_like_any_other(installed, tmp_path):
    page = installed("-m", "dpframe", "--help", cwd=tmp_path)
    assert re.search(r"strategy=localsgd +\S.+ \(dpframe-localsgd 0\.1\.0\)\n", page)


def test_fewer_rounds_send_less_and_learn(installed, tmp_path):
    words = ("recipe=boston", "trainer.gpus=2", "trainer.max_epochs=60", "strategy=localsgd")
    rare = ("trainer.validate_every_epochs=20", "callbacks.checkpoint.every_n_epochs=20")
    steps = "strategy.inner_steps=20"
    output = installed("-m", "dpframe", *words, *rare, steps, "hydra.run.dir=run", cwd=tmp_path)
    assert "sent 38,448 bytes a rank in 12 rounds; ddp's gradients are 768,960, 20 times" in output
    assert float(re.findall(r"^val/rmse +([\d.]+)", output, re.M)[0]) < 8
    checkpoint = "checkpoint=run/checkpoints/last.ckpt"
    test = ("recipe=boston", "strategy=cpu", "mode=test", checkpoint)
    tested = installed("-m", "dpframe", *test, cwd=tmp_path)
    numbers = [re.search(rf"^{name} +(\S+)", text, re.M)[1] for name, text in
               (("val/loss", output), ("test/loss", tested))]  # fmt: skip
    assert numbers[0] == numbers[1]  # one process has the weights that the ranks ended with


def test_what_its_readme_shows_is_what_it_prints(installed, tmp_path):
    shown = re.findall(r"^\$ dpframe (.*)\n(.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    ((words, line),) = shown
    assert line in installed("-m", "dpframe", *words.split(), cwd=tmp_path).splitlines()
