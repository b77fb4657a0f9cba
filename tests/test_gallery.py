"""The gallery: each recipe trains alike on every strategy, resumes to the bit, and learns."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from forked import on
from recorded import Recorder, logs_apart, once, weights, weights_apart
from small import is_same

from dpframe import Callback, Logger, Strategy, Trainer, UserError, seeding
from dpframe.cli.build import build, check_targets
from dpframe.cli.compose import composed
from dpframe.data import DataModule
from dpframe.recipes import gpt, huggingface, text, vae
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.task import Task
from dpframe.trainer import Run

SEED = 3
SAVED_AT = 5  # within the second epoch of each
TINY = {
    "gpt": "task.layers=2 task.width=16 task.heads=2 data.block=16 data.stories=12",
    "vae": "task.latent=2 task.width=8 data.batch_size=400 callbacks.draw.count=2",
    "text": "task.width=4 data.sentences=250",
    "huggingface": "task.config.n_embd=16 task.config.n_layer=1 task.lora.r=2 data.block=16 "
    "data.stories=12 callbacks.sample.length=3 callbacks.adapter=null",
}
if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
    WITHOUT = pytest.mark.skip(reason="transformers and peft are not installed")
    RECIPES = [pytest.param(n, marks=WITHOUT) if n == "huggingface" else n for n in TINY]
else:
    RECIPES = [*TINY]
EXACT = "trainer.precision=64 trainer.max_epochs=2 trainer.log_every=2"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The same numbers


class Takes(Callback):
    """The state at a step, as a checkpoint would hold it."""

    state: Any = None

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == SAVED_AT:
            self.state = deepcopy(trainer.state_dict())


def trained(
    name: str,
    overrides: str,
    strategy: Strategy | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    resume: Any = None,
    directory: str = "",
) -> Trainer:
    """With the callbacks of the recipe's own."""
    shared = "callbacks=none trainer.threads=1"
    job = composed([f"recipe={name}", *shared.split(), *overrides.split()])
    trust = check_targets(job)
    seeding.seed_everything(SEED if resume is None else 99)  # the checkpoint decides
    own = [
        build(node, f"callbacks.{key}", Callback, trust=trust)
        for key, node in job.settings.callbacks.items()
        if node is not None
    ]
    trainer = Trainer(
        build(job.config["task"], "task", Task, trust=trust),
        build(job.config["data"], "data", DataModule, trust=trust),
        strategy=strategy or CPU(),
        settings=job.settings.trainer,
        callbacks=[*own, *callbacks],
        loggers=loggers,
        seed=SEED,
        run=Run(directory=directory),
    )
    trainer.fit(resume)
    return trainer


def numbers(strategy: Strategy, name: str) -> dict[str, Any]:
    recorder = Recorder()
    trainer = trained(name, f"{TINY[name]} {EXACT}", strategy, loggers=[recorder])
    return {"log": recorder.log_, "weights": weights(trainer.task)}


def all_of_them(strategy: Strategy) -> dict[str, Any]:
    """Every recipe in one group of ranks, which takes seconds to start."""
    return {name: numbers(strategy, name) for name in RECIPES if isinstance(name, str)}


@once
def by_one(name: str) -> dict[str, Any]:
    return numbers(CPU(), name)


@once
def by_ranks(replicas: int) -> dict[str, Any]:
    return on(DDP(replicas, "cpu"), all_of_them)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind, replicas", [(DDP, 2), (DDP, 3), (DataParallel, 3)])
def test_replicas_train_as_one_process(kind, replicas, name):
    is_here = kind is DataParallel
    mine = numbers(kind(replicas, "cpu"), name) if is_here else by_ranks(replicas)[name]
    wanted = by_one(name)
    assert len(wanted["log"]) > 3
    assert logs_apart(mine["log"], wanted["log"]) <= 1e-12
    assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-12


@pytest.mark.parametrize("name", RECIPES)
def test_a_resume_within_an_epoch_ends_in_the_same_state_to_the_bit(name):
    takes = Takes()
    whole = trained(name, f"{TINY[name]} {EXACT}", callbacks=[takes])
    assert takes.state["progress"]["batches_done"] > 0
    again = trained(name, f"{TINY[name]} {EXACT}", callbacks=[Takes()], resume=takes.state)
    assert whole.global_step == again.global_step > SAVED_AT
    # But for `progress`, which has seconds in it.
    states = [{**trainer.state_dict(), "progress": None} for trainer in (whole, again)]
    assert is_same(*states)


# gpt


def test_gpt_sees_nothing_that_comes_later():
    net = gpt.Transformer(vocabulary=9, block=6, layers=2, heads=2, width=8, dropout=0.0)
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    other = torch.tensor([[1, 2, 3, 8, 8, 8]])
    logits, others = net(text)[0], net(other)[0]
    assert torch.allclose(logits[:3], others[:3])
    assert not torch.allclose(logits[3:], others[3:])


def test_overrides_make_gpt_2():
    """Of 124 million parameters, as many as the one that was published."""
    size = "task.vocabulary=50257 task.layers=12 task.heads=12 task.width=768 data.block=1024"
    job = composed(["recipe=gpt", *size.split()])
    with torch.device("meta"):
        task = build(job.config["task"], "task", Task, trust=check_targets(job))
    assert sum(p.numel() for p in task.parameters()) == 124_439_808


def test_gpt_learns_to_write_stories_and_prints_what_it_writes(capsys):
    size = "task.layers=2 task.width=48 task.heads=2 data.block=48 data.stories=400"
    trainer = trained("gpt", f"{size} data.batch_size=8 task.optimizer.lr=0.005")
    assert trainer.metrics["val/loss"] < 1.3
    *_, sample, _ = capsys.readouterr().out.split("\n\n")
    written, known = (re.findall(r"\w+", text) for text in (sample, gpt.stories(400).decode()))
    assert sum(word in known for word in written) > 0.3 * len(written) > 10


# vae


def test_vae_learns_to_draw_digits_and_prints_some(capsys):
    trainer = trained("vae", "task.width=64 trainer.max_epochs=12 callbacks.draw.shown=3")
    assert trainer.metrics["val/loss"] < 26.7  # without codes: 27.5
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 8 and max(map(len, lines)) > 32
    assert "@" in "".join(lines) and not set("".join(lines)) - set(vae.INK)


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it():
    together = vae.noise_of(torch.tensor([3, 5, 8]), 4, seed=1, epoch=2)
    alone = vae.noise_of(torch.tensor([5]), 4, seed=1, epoch=2)
    assert torch.equal(together[1:2], alone)
    assert len({*together.flatten().tolist()}) == 12
    assert not torch.equal(alone, vae.noise_of(torch.tensor([5]), 4, seed=1, epoch=3))


# text


def test_text_learns_that_a_tag_depends_on_the_words_around_it(capsys):
    trainer = trained("text", "data.sentences=1500 trainer.max_epochs=3 task.optimizer.lr=0.01")
    assert trainer.metrics["val/accuracy"] > 0.95  # from the word alone: 0.78
    said = capsys.readouterr().out
    assert "the/DET old/ADJ man/NOUN can/AUX fish/VERB" in said
    assert "saw/VERB a/DET saw/NOUN" in said


def test_numbers_of_a_sentence_do_not_depend_on_its_padding():
    task = text.Text(torch.optim.Adam)
    words = torch.tensor([[3, 4, 5]])
    padded = torch.nn.functional.pad(words, (0, 4), value=text.PADDING)
    assert torch.equal(task(words), task(padded)[:, :3])


def test_batches_by_length_hold_each_row_once_and_little_padding():
    data = text.TextData(sentences=1000)
    data.setup()
    lengths = [len(words) for words, _ in data.train_dataset().rows]
    batches = list(data.train_sampler(data.train_dataset()))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    assert padded < 1.4 * sum(lengths)
    assert batches != list(data.train_sampler(data.train_dataset()))


# huggingface


def test_huggingface_learns_and_leaves_an_adapter_that_peft_reads(tmp_path, monkeypatch):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from peft import PeftModel

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    size = "data.stories=300 data.block=48 data.batch_size=8 task.config.n_layer=2"
    trainer = trained("huggingface", size, directory=str(tmp_path))
    assert trainer.metrics["val/loss"] < 2
    assert not trainer.task.net.base_model.model.transformer.wte.weight.requires_grad
    torch.manual_seed(SEED)  # of the weights that LoRA has left as they were
    config = trainer.task.net.base_model.model.config
    base = huggingface.language_model(config.to_dict(), None)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    rows = trainer.data.val_dataset().tensors[0][:2].long()[:, :-1]
    trainer.task.eval()
    with torch.no_grad():
        assert torch.allclose(loaded(rows).logits, trainer.task.net(rows).logits, atol=1e-5)


def test_huggingface_refuses_a_name_that_it_would_have_to_download():
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(UserError, match=r"task\.pretrained=gpt2 is no folder; name one that"):
        huggingface.HuggingFace(torch.optim.Adam, pretrained="gpt2")


def test_huggingface_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs transformers; pip install 'dpframe\[hugging"):
        huggingface.HuggingFace(torch.optim.Adam)
