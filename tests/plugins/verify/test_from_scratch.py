"""examples/from_scratch: ranks that send and receive, and have ddp's numbers."""

import re
import sys

import pytest
import torch
from command import ROOT, dpframe
from torch import nn

from dpframe import UserError
from dpframe.testing import check_strategy

EXAMPLE = ROOT / "examples" / "from_scratch"
VERIFIED = re.compile(r"^dpframe --config-dir (\S+) (mode=verify .*)$", re.M)


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    yield
    sys.modules.pop("from_scratch", None)


def test_it_passes_every_check_as_its_readme_shows_with_nothing_but_send_and_recv(tmp_path):
    folder, words = VERIFIED.findall((EXAMPLE / "README.md").read_text())[0]
    done = dpframe(
        "--config-dir", str(ROOT / folder), *words.split(), "trainer.accelerator=cpu", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on FromScratch: 3 replicas in 3 processes on cpu" in done.stdout
    assert "22 of 22 checks passed" in done.stdout
    source = (EXAMPLE / "from_scratch.py").read_text()
    assert set(re.findall(r"\bdist\.(\w+)", source)) == {"send", "recv"}


@pytest.mark.gpu(2)
def test_it_passes_every_check_on_gpus():
    from from_scratch import FromScratch

    assert check_strategy(FromScratch, gpus=2, accelerator="cuda").passed


def test_a_gradient_that_is_missing_is_refused_in_one_line():
    from from_scratch import FromScratch

    strategy = FromScratch()
    strategy.weights = {"task.net.unused": nn.Parameter(torch.ones(2))}
    with pytest.raises(UserError, match="^net.unused has no dense gradient in this step, and"):
        strategy.check_gradients()
