"""The gallery: each recipe trains alike on every strategy, resumes to the bit, and learns."""

import gzip
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_turn, on
from recorded import Recorder, logs_apart, once, weights, weights_apart
from small import Hooks, is_same

from dpframe import Callback, Logger, Strategy, Trainer, UserError, checkpoint, seeding
from dpframe.config.build import build, check_targets
from dpframe.config.compose import Composed, composed
from dpframe.config.schema import is_off
from dpframe.data import DataModule
from dpframe.recipes import clip, gpt, huggingface, multilabel, stream, text, transfer, vae
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.processes import Processes
from dpframe.strategies.single import CPU, SingleGPU
from dpframe.task import Task
from dpframe.trainer import RunInfo

SEED = 3
SAVED_AT = 5  # within the second epoch of each
TINY = {
    "gpt": "task.layers=2 task.width=16 task.heads=2 data.block=16 data.stories=12",
    "vae": "task.latent=2 task.width=8 data.batch_size=400 callbacks.draw.count=2",
    "text": "task.width=4 data.sentences=250",
    "gan": "task.latent=2 task.width=2 data.batch_size=400 callbacks.draw.count=2 task.n_critic=2",
    "clip": "task.width=2 task.size=4 data.pairs=22 data.batch_size=6 callbacks.captions.count=1",
    "huggingface": "task.config.n_embd=16 task.config.n_layer=1 task.lora.r=2 data.block=16 "
    "data.stories=12 callbacks.sample.length=3 callbacks.adapter=null",
    "multilabel": "task.width=4 data.batch_size=480 callbacks.checkpoint=null",
    "transfer": "data.rows=10 callbacks.freeze.thaw_at_epoch=1 callbacks.checkpoint=null",
    "stream": "task.width=4 data.shards=6 data.batch_size=300 data.divide_streams=false",
}
# The packages that a recipe needs.
EXTRAS = {"huggingface": ["transformers", "peft"], "multilabel": ["torchmetrics"]}
MISSING = {
    name: [package for package in EXTRAS.get(name, ()) if find_spec(package) is None]
    for name in TINY
}
RECIPES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(m), reason=f"without {', '.join(m)}"))
    for name, m in MISSING.items()
]
EXACT = "trainer.precision=64 trainer.max_epochs=2 trainer.log_every=2 trainer.sanity_batches=0"
LOGICAL = "trainer.logical_replicas=4 trainer.max_epochs=1 trainer.sanity_batches=0"
HAS_BITS = [name for name in TINY if name != "clip"]  # its loss gathers rows


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


@cache
def job_of(name: str, overrides: str) -> Composed:
    shared = "callbacks=none trainer.threads=1"
    job = composed([f"recipe={name}", *shared.split(), *overrides.split()])
    check_targets(job)
    return job


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
    job = job_of(name, overrides)
    seeding.seed_everything(SEED if resume is None else 99)  # the checkpoint decides
    own = [
        build(node, f"callbacks.{key}", Callback)
        for key, node in job.settings.callbacks.items()
        if not is_off(node)
    ]
    trainer = Trainer(
        build(job.config["task"], "task", Task),
        build(job.config["data"], "data", DataModule),
        strategy=strategy or CPU(),
        settings=job.settings.trainer,
        callbacks=[*own, *callbacks],
        loggers=loggers,
        seed=SEED,
        run=RunInfo(directory=directory),
    )
    trainer.fit(resume)
    return trainer


def numbers(strategy: Strategy, name: str) -> dict[str, Any]:
    recorder = Recorder()
    trainer = trained(name, f"{TINY[name]} {EXACT}", strategy, loggers=[recorder])
    return {"log": recorder.log_, "weights": weights(trainer.task)}


def bits(strategy: Strategy, name: str) -> Any:
    recorder = Recorder()
    trainer = trained(name, f"{TINY[name]} {LOGICAL}", strategy, loggers=[recorder])
    optimizers = [deepcopy(u.optimizer.state_dict()) for u in trainer.updates.values()]
    return recorder.log_, deepcopy(trainer.task.state_dict()), optimizers


def all_of_them(strategy: Strategy) -> dict[str, dict[str, Any]]:
    """Every recipe in one group of ranks, which takes seconds to start."""
    names = [name for name in TINY if not MISSING[name]]
    results = {"numbers": {name: numbers(strategy, name) for name in names}}
    if isinstance(strategy, DDP):
        results["bits"] = {name: bits(strategy, name) for name in names if name in HAS_BITS}
    return results


def compose_all() -> None:
    """Before the ranks are forked, which have all of it then."""
    for name in TINY:
        if not MISSING[name]:
            job_of(name, f"{TINY[name]} {EXACT}")
            job_of(name, f"{TINY[name]} {LOGICAL}")


@once
def by_one(name: str) -> dict[str, Any]:
    return numbers(CPU(), name)


@once
def by_ranks(kind: type[Processes], replicas: int) -> dict[str, dict[str, Any]]:
    return on(kind(replicas, "cpu"), all_of_them, enter=compose_all)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind, replicas", [(DDP, 3), (FSDP, 2), (DataParallel, 3)])
def test_replicas_train_as_one_process(kind, replicas, name):
    if kind is DataParallel:
        mine = numbers(kind(replicas, "cpu"), name)
    else:
        mine = by_ranks(kind, replicas)["numbers"][name]
    wanted = by_one(name)
    assert len(wanted["log"]) > 3
    assert logs_apart(mine["log"], wanted["log"]) <= 1e-12
    assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-12


def test_logical_shares_have_the_same_bits_on_ranks_as_in_one_process():
    mine = by_ranks(DDP, 3)["bits"]
    assert len(mine) >= 6
    assert [name for name in mine if not is_same(mine[name], bits(CPU(), name))] == []


def on_gpus(strategy: Strategy, names: list[str]) -> dict[str, Any]:
    return {name: numbers(strategy, name) for name in names if not MISSING[name]}


@pytest.mark.frees_by_waits  # fully_shard's gathered weights
@pytest.mark.parametrize(
    "kinds, most",
    [
        pytest.param([SingleGPU], 1, marks=pytest.mark.gpu(1)),
        pytest.param([DataParallel], 4, marks=pytest.mark.gpu(2)),
        pytest.param([DDP, FSDP], 2, marks=pytest.mark.gpu(2)),
    ],
)
def test_recipes_train_on_gpus_as_on_the_cpu(kinds, most):
    """All on one GPU, and each on several by one of the strategies."""
    gpus = min(torch.cuda.device_count(), most)
    turn = [DDP, FSDP, DataParallel]  # torchmetrics, in multilabel, can't count in copies
    names = {
        kind: [n for i, n in enumerate(sorted(TINY)) if most == 1 or turn[i % 3] is kind]
        for kind in kinds
    }
    for found in in_turn([(kind(gpus, "cuda"), on_gpus, names[kind]) for kind in kinds]):
        assert len(found) >= (7 if most == 1 else 2)
        compare(found)


def compare(found: dict[str, Any]) -> None:
    for name, mine in found.items():
        wanted = by_one(name)
        assert logs_apart(mine["log"], wanted["log"]) <= 1e-9, name
        assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-9, name


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
    net = gpt.Transformer(
        vocabulary=9, block=6, layers=2, heads=2, width=8, dropout=0, attention_dropout=0
    )
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    other = torch.tensor([[1, 2, 3, 8, 8, 8]])
    logits, others = net(text)[0], net(other)[0]
    assert torch.allclose(logits[:3], others[:3])
    assert not torch.allclose(logits[3:], others[3:])


def test_gpt_with_dropout_but_in_attention_trains_alike_on_any_number_of_replicas():
    words = f"{TINY['gpt']} {EXACT} trainer.dropout=row task.dropout=0.1"
    places = [CPU(), DataParallel(2, "cpu"), DataParallel(3, "cpu")]
    whole, *others = (trained("gpt", f"{words} task.attention_dropout=0", at) for at in places)
    for other in others:
        assert not other.training.own
        assert weights_apart(weights(other.task), weights(whole.task)) <= 1e-12
    own = trained("gpt", f"{words} trainer.max_steps=1", places[1]).training.own
    assert own.startswith("of each replica's own: net.blocks.0 (scaled_dot_product_attention), ")


def test_an_experiment_makes_gpt_2():
    """Of 124 million parameters, as many as the one that was published."""
    job = composed(["experiment=gpt2_124m"])
    assert job.settings.recipe == "gpt"
    with torch.device("meta"):
        task = build(job.config["task"], "task", Task)
    assert sum(p.numel() for p in task.parameters()) == 124_439_808


def test_the_experiment_of_gpt_2_trains_on_the_stories_and_validates():
    size = "task.vocabulary=500 task.layers=2 task.width=16 task.heads=2 data.block=64"
    words = f"experiment=gpt2_124m {size} data.stories=100 task.optimizer.lr=0.01"
    trainer = trained("gpt", words)
    assert trainer.settings.precision == "bf16"
    assert trainer.metrics["val/loss"] < 5 < math.log(500)


def test_the_experiment_with_muon_learns_more_in_as_many_steps_as_adamw():
    size = "task.layers=2 task.width=48 task.heads=2 data.block=48 data.stories=100"
    words = f"experiment=gpt_muon {size} data.batch_size=8 trainer.max_steps=40"
    one = trained("gpt", words)
    other = trained("gpt", f"{words} task.optimizer.groups.matrices=null")
    parts = [type(part).__name__ for part in one.update.optimizer.parts]
    assert parts == ["AdamW", "Muon"]
    assert one.metrics["val/loss"] < other.metrics["val/loss"] - 0.1


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
    assert {*"@%"} & {*"".join(lines)} and not {*"".join(lines)} - {*vae.INK}


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


def left(strategy: Strategy, folder: Path) -> None:
    size = TINY["huggingface"].removesuffix("callbacks.adapter=null")
    with_less = f"{size} {EXACT} trainer.checkpoint_activations=true"
    trained("huggingface", with_less, strategy, directory=str(folder))


def test_huggingface_leaves_the_adapter_that_ranks_with_parts_of_it_have_learned(tmp_path):
    """Each block is computed again in the backward, which a cache of keys and values forbids."""
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from safetensors.torch import load_file

    on(FSDP(2, "cpu"), left, tmp_path / "of two")
    left(CPU(), tmp_path / "of one")
    mine, wanted = (
        load_file(tmp_path / of / "adapter" / "adapter_model.safetensors")
        for of in ("of two", "of one")
    )
    assert mine.keys() == wanted.keys() and len(wanted) > 4
    assert weights_apart(mine, wanted) <= 1e-12


def test_huggingface_refuses_a_name_that_it_would_have_to_download():
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(UserError, match=r"task\.pretrained=gpt2 is no folder; name one that"):
        huggingface.HuggingFace(torch.optim.Adam, pretrained="gpt2")


def test_huggingface_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs transformers; pip install 'dpframe\[hugging"):
        huggingface.HuggingFace(torch.optim.Adam)


# multilabel


def test_multilabel_learns_and_prints_what_it_says_of_each_digit(capsys):
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    size = "callbacks.checkpoint=null trainer.max_epochs=12 task.optimizer.lr=0.01"
    metrics = trained("multilabel", size).metrics
    assert metrics["val/clean/f1"] > 0.93 > 0.85 > metrics["val/noisy/f1"] > 0.7
    assert metrics["val/clean/auroc"] > 0.98 > metrics["val/noisy/auroc"] > 0.85
    said = capsys.readouterr().out
    assert re.search(r"^ +clean +noisy\n0  even has_loop .*\n1 .*\n2  even prime ", said, re.M)


def test_answers_are_signed_where_they_are_wrong():
    said = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]]).bool()
    right = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]]).bool()
    assert multilabel.answers(said, right) == ["even -prime +above_five", "prime"]


def test_multilabel_without_torchmetrics_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(UserError, match=r"needs torchmetrics; pip install 'dpframe\[metrics\]'"):
        trained("multilabel", "trainer.max_epochs=1")


# transfer


def test_transfer_freezes_what_was_trained_on_other_digits_and_thaws_it(capsys):
    seen = []
    hook = Hooks(on_step_end=lambda t: seen.append(weights(t.task)))
    size = "callbacks.checkpoint=null trainer.max_epochs=6 callbacks.freeze.thaw_at_epoch=4"
    trainer = trained("transfer", size, callbacks=[hook])
    packaged = checkpoint.load(transfer.PACKAGED)["task"]
    is_packaged = [
        all((step[name] == packaged[name].numpy()).all() for name in packaged if "head" not in name)
        for step in seen
    ]
    assert is_packaged == [True] * 28 + [False] * 14
    assert trainer.metrics["val/accuracy"] > 0.9
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split("accuracy")[0].rstrip() for line in lines] == [
        "the head alone  to step 28",
        "all weights     to step 42",
    ]
    assert float(lines[0].split()[-1]) > 0.87  # on random features: 0.8


def test_a_checkpoint_of_transfer_is_what_it_may_begin_with(tmp_path):
    size = "callbacks.checkpoint=null callbacks.freeze=null data.digits=[0,1] task.classes=2"
    first = trained("transfer", f"{size} task.pretrained=null trainer.max_epochs=1")
    file = tmp_path / "run/checkpoints/best.ckpt"
    checkpoint.save(first.state_dict(), file)
    task = transfer.Transfer(torch.optim.Adam, pretrained=str(file))
    task.on_fit_start(first)
    mine = {name: weight for name, weight in task.state_dict().items() if "head" not in name}
    assert is_same(mine, {name: first.task.state_dict()[name] for name in mine})
    task.pretrained = str(tmp_path / "nowhere.ckpt")
    with pytest.raises(UserError, match="^task.pretrained=.*nowhere.ckpt: there is no such file"):
        task.on_fit_start(first)


# stream


def test_stream_learns_when_it_is_slow_and_prints_the_day(capsys):
    trainer = trained("stream", "data.shards=20 trainer.max_epochs=4 task.optimizer.lr=0.01")
    assert trainer.metrics["val/minutes"] < 1.5  # without the hour: 2.2
    said = capsys.readouterr().out
    minutes = {
        int(hour): (int(weekday), int(weekend))
        for hour, weekday, weekend in re.findall(r"^ ?(\d+):00 +#+ (\d+) min +#+ (\d+)", said, re.M)
    }
    assert len(minutes) == 12
    assert minutes[8][0] > 1.3 * minutes[8][1] and abs(minutes[2][0] - minutes[2][1]) <= 1


def opened(strategy: Strategy, folder: Path) -> None:
    """Writes down each file that is opened, in whatever process of the job."""
    file = os.open(folder / "opened", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, args: tuple) -> None:
        if event == "open" and str(args[0]).endswith(".csv.gz"):
            os.write(file, f"{Path(args[0]).name}\n".encode())

    sys.addaudithook(note)
    size = "data.workers=2 trainer.max_epochs=2 trainer.sanity_batches=0 task.width=2"
    # The share check reads the first rows once more.
    trained("stream", f"data.folder={folder} trainer.share_check=off {size}", strategy)


def test_stream_opens_each_file_once_an_epoch_over_all_ranks_and_workers(tmp_path):
    stream.write(tmp_path, shards=9)
    on(DDP(2, "cpu"), opened, tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.csv.gz"))
    assert len(names) == 9
    assert Counter((tmp_path / "opened").read_text().split()) == dict.fromkeys(names, 2)


def test_files_of_stream_have_the_rows_that_are_made_without_them(tmp_path):
    stream.write(tmp_path, shards=2)
    rows = [list(stream.read_file(path)) for path in sorted(tmp_path.iterdir())]
    assert rows == [list(stream.trips_of(shard)) for shard in range(2)]


def test_what_stream_can_not_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"has 0 files \*.csv.gz, of which 4 are held out; write "):
        stream.StreamData(folder=str(tmp_path)).setup()
    path = tmp_path / "trips.csv.gz"
    path.write_bytes(gzip.compress(b"hour,miles\n1,2\n"))
    with pytest.raises(UserError, match=r"trips.csv.gz: the columns are hour,miles; they must be"):
        list(stream.read_file(path))


# gan


def test_gan_learns_to_draw_digits_and_prints_some(capsys):
    size = "task.width=8 task.latent=8 data.batch_size=32 trainer.max_epochs=6"
    trainer = trained("gan", f"{size} callbacks.draw.shown=3")
    assert trainer.metrics["val/loss"] < 2  # that of the mean image is 2.16
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 8 and max(map(len, lines)) > 32
    assert {*"@%"} & {*"".join(lines)} and not {*"".join(lines)} - {*vae.INK}


def test_gan_trains_the_generator_at_every_so_many_steps():
    trainer = trained("gan", f"{TINY['gan']} task.n_critic=3 trainer.max_epochs=2")
    updates = {
        name: {int(state["step"]) for state in update.optimizer.state.values()}
        for name, update in trainer.updates.items()
    }
    assert updates == {"critic": {8}, "generator": {2}}


# clip


def test_clip_learns_to_find_captions_and_prints_some(capsys):
    size = "task.width=16 task.size=32 data.pairs=1500 data.batch_size=32 task.optimizer.lr=0.005"
    trainer = trained("clip", f"{size} trainer.max_epochs=4 callbacks.captions.count=2")
    assert trainer.metrics["val/caption_found"] > 0.4  # by chance 0.01
    assert trainer.metrics["val/image_found"] > 0.4
    said = capsys.readouterr().out
    assert len(re.findall(r"^a (faint|bold) \w+ left of a (faint|bold) \w+$", said, re.M)) == 2


def test_the_loss_of_clip_is_that_of_the_right_pairs_both_ways():
    torch.manual_seed(0)
    task = clip.CLIP(torch.optim.Adam, width=2, size=4).double()
    image, words = torch.rand(3, 1, 8, 16, dtype=torch.float64), clip.all_captions()[:3]
    images, captions = (
        part / part.norm(dim=1, keepdim=True) for part in (task.images(image), task.captions(words))
    )
    cosines = 10 * images @ captions.T
    wanted = -(cosines.log_softmax(0).diag() + cosines.log_softmax(1).diag()).mean() / 2
    measured = task.training_step([image, words, torch.arange(3)])
    assert measured["loss"].item() == pytest.approx(wanted.item(), abs=1e-6)  # of log(10)
    twice = task.training_step([image[:1].repeat(3, 1, 1, 1), words[[0, 0, 0]], torch.zeros(3)])
    assert twice["loss"].item() == pytest.approx(math.log(3))
    assert twice["caption_found"] == twice["image_found"] == 1


def test_each_caption_says_which_digit_is_where():
    said = {(form, clip.caption(meaning, form)) for meaning in clip.MEANINGS for form in clip.FORMS}
    texts = {text for _, text in said}
    assert len(texts) == len(clip.MEANINGS) * len(clip.FORMS) == 2000
    words = torch.stack([clip.words_of(text) for text in texts])
    assert len(words.unique(dim=0)) == 2000
    data = clip.CLIPData(pairs=40)
    data.setup()
    images, words, meanings = data.train_dataset().tensors
    for image, row, meaning in zip(images, words, meanings, strict=True):
        left, left_ink, right, right_ink = clip.MEANINGS[meaning]
        assert {left, left_ink, right, right_ink} <= {clip.VOCABULARY[word] for word in row}
        halves = image.split(8, dim=2)
        for half, ink in zip(halves, (left_ink, right_ink), strict=True):
            assert half.max().item() == pytest.approx(clip.INKS[ink], rel=0.1)
