"""Models of transformers: fine-tuned exactly, and left as `from_pretrained` reads them."""

import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import on, run
from recorded import weights, weights_apart
from safetensors.torch import load_file
from small import Hooks
from test_gallery import job_of, trained
from test_readme import commands_of
from torch.nn import functional

from dpframe import Strategy, Trainer, UserError
from dpframe.config.build import build
from dpframe.plugins.huggingface import weights as weights_of
from dpframe.plugins.huggingface.chats import ChatData, chat_of, packs
from dpframe.plugins.huggingface.classify import TextData
from dpframe.plugins.huggingface.model import model_of
from dpframe.plugins.huggingface.save import SavePretrained
from dpframe.plugins.huggingface.sft import SFT as SFTTask
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}<|end|>{% endgeneration %}{% else %}{{ m.content | trim }}<|end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTS = [(3, 1), (5, 2), (2, 1), (4, 3), (9, 1), (3, 2), (6, 1), (2, 2), (7, 1), (4, 1), (8, 2)]


def chats() -> list[list[dict[str, str]]]:
    """Of one to three turns."""
    return [
        [
            message
            for turn in range(turns)
            for message in (
                {"role": "user", "content": f"count to {size + turn}"},
                {"role": "assistant", "content": " ".join(map(str, range(1, size + turn + 1)))},
            )
        ]
        for size, turns in COUNTS
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    learns = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([m["content"] for chat in chats() for m in chat], learns)
    named = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3 of two layers, a GPT-2 of one, and a file of chats."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    words = tokenizer()
    sizes = {"vocab_size": len(words), "hidden_size": 32, "num_hidden_layers": 2}
    qwen = transformers.Qwen3Config(
        **sizes,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
        max_position_embeddings=256,
    )
    gpt = transformers.GPT2Config(
        vocab_size=len(words),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
    )
    transformers.Qwen3ForCausalLM(qwen).save_pretrained(folder / "qwen3")
    transformers.GPT2LMHeadModel(gpt).save_pretrained(folder / "gpt2")
    for name in ("qwen3", "gpt2"):
        words.save_pretrained(folder / name)
    rows = [json.dumps({"messages": chat}) for chat in chats()]
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n")
    return folder


SFT = (
    "data.length=40 data.batch_size=3 data.shuffle=false trainer.precision=64 trainer.max_epochs=2 "
    "trainer.accumulate=2 trainer.clip_norm=0.5 task.optimizer.lr=0.01 task/schedule=constant "
    "task.schedule.warmup=0 callbacks.save_pretrained=null"
)
LORA = "task.lora={r:2,target_modules:[c_attn,c_proj],fan_in_fan_out:true}"


def sft(tiny: Path, more: str = "", name: str = "gpt2", **how: Any) -> Any:
    given = f"task.model={tiny / name} data.train={tiny / 'chats.jsonl'}"
    return trained("sft", f"{given} {SFT} {more}", **how)


def tuned(strategy: Strategy, tiny: Path, more: str) -> dict[str, Any]:
    return weights(sft(tiny, more, strategy=strategy).task)


@pytest.mark.parametrize("strategy", [DataParallel(2, "cpu"), DDP(2, "cpu"), FSDP(2, "cpu")])
@pytest.mark.parametrize("more", ["", f"{LORA} trainer.checkpoint_activations=true"])
def test_replicas_learn_the_answers_that_one_learns(tiny, strategy, more):
    wanted = tuned(CPU(), tiny, more)
    if strategy.launches_ranks:
        mine = on(strategy, tuned, tiny, more)
    else:
        mine = tuned(strategy, tiny, more)
    assert weights_apart(mine, wanted) <= 1e-10


def read_in_parts(strategy: Strategy, tiny: Path, name: str) -> dict[str, Any]:
    """Each rank builds the model without numbers."""
    job = job_of("sft", f"task.model={tiny / name} data.train={tiny / 'chats.jsonl'} {SFT}")
    with strategy.sharding.building():
        task = build(job.config["task"], "task", SFTTask)
    assert any(weight.is_meta for weight in task.parameters())
    data = build(job.config["data"], "data", ChatData)
    trainer = Trainer(task, data, strategy=strategy, settings=job.settings.trainer)
    trainer.fit()
    return weights(task)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_model_that_is_read_in_parts_learns_as_one_that_is_read_whole(tiny, name):
    mine = on(FSDP(2, "cpu", meta_init=True), read_in_parts, tiny, name)
    assert weights_apart(mine, weights(sft(tiny, name=name).task)) <= 1e-10


@pytest.mark.parametrize("parts", [False, True])
def test_an_outline_has_what_from_pretrained_reads(tiny, tmp_path, monkeypatch, parts):
    monkeypatch.setattr(weights_of, "fill_later", lambda net, reads: filled.append((net, reads)))
    kind, filled = transformers.AutoModelForCausalLM, []
    wanted = kind.from_pretrained(tiny / "qwen3")
    wanted.generation_config.max_new_tokens = 7
    wanted.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if parts else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > parts
    before = torch.get_rng_state()
    net = weights_of.outline_of(partial(kind.from_config, wanted.config), str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert net.generation_config.max_new_tokens == 7
    ((_, reads),) = filled
    mine, theirs = dict(net.named_parameters()), dict(wanted.named_parameters())
    assert mine.keys() == theirs.keys() == reads.keys()
    assert all(torch.equal(reads[name](), theirs[name]) for name in mine)
    buffers = dict(net.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], value) for name, value in wanted.named_buffers())


def test_a_model_with_weights_to_make_or_to_convert_is_read_by_transformers(tiny, tmp_path):
    """Its outline would lack a new head, or what is computed from several tensors of the files."""
    kind = transformers.AutoModelForSequenceClassification
    config = transformers.AutoConfig.from_pretrained(tiny / "qwen3")
    assert weights_of.outline_of(partial(kind.from_config, config), str(tiny / "qwen3")) is None
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    experts.save_pretrained(tmp_path)
    make = partial(type(experts), experts.config)
    assert weights_of.outline_of(make, str(tmp_path)) is None


def test_documents_of_a_packed_row_do_not_see_each_other(tiny):
    """The loss over rows of several chats is that over rows of one."""
    losses = [
        sft(
            tiny, f"data.packed={packed} trainer.max_epochs=1 task.optimizer.lr=0 {more}", name
        ).metrics["train/loss"]
        for name, more in (("gpt2", ""), ("qwen3", "task.attention=eager"))
        for packed in ("true", "false")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[2] == pytest.approx(losses[3], rel=1e-6)  # its norms are in 32 bits


def test_a_row_on_its_own_is_what_flash_attention_gets(tiny):
    task = sft(tiny, "trainer.max_steps=1").task
    batch = sft_rows(tiny)
    wanted = task.training_step(batch)
    task.is_flat = True
    mine = task.training_step(batch)
    assert torch.allclose(mine["loss"], wanted["loss"], rtol=1e-12)
    assert mine["weight"] == wanted["weight"] > 20


def sft_rows(tiny: Path) -> dict[str, torch.Tensor]:
    data = ChatData(str(tiny / "gpt2"), str(tiny / "chats.jsonl"), length=40)
    data.setup()
    return data.collate([data.train_dataset()[row] for row in range(3)])


def test_a_model_that_sees_other_documents_is_refused(tiny, monkeypatch):
    kind = transformers.GPT2LMHeadModel
    forward = kind.forward
    sees = lambda self, position_ids, **inputs: forward(self, **inputs)  # noqa: E731
    monkeypatch.setattr(kind, "forward", sees)
    with pytest.raises(UserError) as caught:
        sft(tiny)
    assert str(caught.value) == (
        "GPT2LMHeadModel doesn't keep the documents of a packed row apart; set data.packed=false"
    )
    assert sft(tiny, "data.packed=false trainer.max_steps=1").metrics


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_alone_are_learned_up_to_the_sign_that_ends_them(template):
    words = tokenizer()
    words.chat_template = template
    for chat in chats():
        tokens, is_answer = chat_of({"messages": chat}, "messages", words, "here")
        whole = words.apply_chat_template(chat, tokenize=False)
        assert words.decode(tokens) == whole
        answers = [m["content"] + "<|end|>" for m in chat if m["role"] == "assistant"]
        assert words.decode(tokens[is_answer]) == "".join(answers)


THINKS = (  # as Qwen3's does, of the last answer alone
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_answers_are_found_where_a_template_writes_the_last_one_differently():
    words = tokenizer()
    words.chat_template = THINKS
    tokens, is_answer = chat_of({"messages": chats()[1]}, "messages", words, "here")
    assert words.decode(tokens[is_answer]) == ("1 2 3 4 5<|end|><think></think>1 2 3 4 5 6<|end|>")


def test_a_template_that_changes_answers_is_refused():
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.content | upper }}{{ messages | length }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="^x, line 1: the chat template changes what came before"):
        chat_of({"messages": chat}, "messages", words, "x, line 1")


def test_what_a_template_says_of_a_chat_is_a_line(tiny, tmp_path):
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('roles must take turns') }}")
    given = {"train": str(tiny / "chats.jsonl"), "template": str(tmp_path / "strict.jinja")}
    with pytest.raises(UserError, match=r"chats\.jsonl, line 1: its chat template: roles must"):
        ChatData(str(tiny / "gpt2"), **given).setup()


def test_rows_are_filled_and_no_chat_is_lost():
    lengths = [7, 3, 9, 2, 2, 5, 8, 1, 10, 4]
    rows = packs(lengths, 10)
    assert sorted(chat for row in rows for chat in row) == list(range(10))
    filled = [sum(lengths[chat] for chat in row) for row in rows]
    assert max(filled) <= 10 and len(rows) == 6


@pytest.mark.parametrize("strategy", [CPU(), FSDP(2, "cpu")])
@pytest.mark.parametrize("name, more", [("qwen3", ""), ("gpt2", LORA)])
def test_what_was_learned_is_left_as_from_pretrained_reads_it(tiny, tmp_path, strategy, name, more):
    row = sft_rows(tiny)["input_ids"][0, :20].tolist()
    wanted = on(strategy, saved, tiny, name, more, tmp_path, row)
    folder = tmp_path / "pretrained"
    if more:
        from peft import AutoPeftModelForCausalLM as auto
    else:
        auto = transformers.AutoModelForCausalLM
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    net = auto.from_pretrained(folder, dtype=torch.float64).eval()
    assert torch.allclose(
        logits(net, row), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-10
    )
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words.chat_template == TEMPLATE


def saved(
    strategy: Strategy, tiny: Path, name: str, more: str, folder: Path, row: list[int]
) -> list[Any]:
    seen: list[Any] = []
    sees = Hooks(on_fit_end=lambda trainer: seen.append(logits(trainer.task.eval().net, row)))
    callbacks = [SavePretrained(), sees]
    sft(tiny, more, name, strategy=strategy, callbacks=callbacks, directory=str(folder))
    return seen[0].tolist()


@torch.no_grad()
def logits(net: Any, row: list[int]) -> torch.Tensor:
    return net(input_ids=torch.tensor([row])).logits


def theirs(tiny: Path, folder: Path) -> dict[str, Any]:
    data = sft(tiny, "trainer.max_steps=1").data
    rows = [data.collate([row]) for row in data.train_dataset()]
    rows = [{name: value[0] for name, value in row.items()} for row in rows]
    for row in rows:
        following = row.pop("targets")
        row["labels"] = torch.cat([torch.tensor([-100]), following[:-1]])
    net = transformers.AutoModelForCausalLM.from_pretrained(tiny / "gpt2", dtype=torch.float64)
    args = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(net, args, train_dataset=rows, compute_loss_func=token_mean).train()
    return weights(net)


def token_mean(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """As transformers' own, which is in 32 bits whatever the model is."""
    logits, following = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(logits, following, reduction="sum") / num_items_in_batch


def test_weights_are_those_of_the_trainer_of_transformers(tiny, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    mine = weights(sft(tiny).task.net)
    apart = weights_apart(mine, theirs(tiny, tmp_path))
    assert apart <= 1e-10


# classify

LABELS = ["negative", "positive"]


@pytest.fixture(scope="module")
def reviews(tiny: Path) -> Path:
    """A file of texts, and a DistilBERT, which takes no `token_type_ids`."""
    still = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = transformers.DistilBertConfig(
        **still,
        vocab_size=300,
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=64,
    )
    transformers.DistilBertModel(config).save_pretrained(tiny / "bert")
    words = tokenizer()
    words.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    words.save_pretrained(tiny / "bert")
    rows = [
        {
            "text": " ".join("1" * (1 + row % 5)),
            "label": [row % 5 // 3, LABELS[row % 5 // 3]][row % 2],
        }
        for row in range(10)
    ]
    (tiny / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tiny


def classified(strategy: Strategy, reviews: Path, folder: str = "", name: str = "bert") -> Any:
    given = f"task.model={reviews / name} data.train={reviews / 'reviews.jsonl'}"
    given += f" data.val={reviews / 'reviews.jsonl'} task.labels=[negative,positive]"
    more = "data.batch_size=4 trainer.precision=64 trainer.max_epochs=2 task.optimizer.lr=0.01"
    kept = "" if folder else "callbacks.save_pretrained=null"
    trainer = trained("classify", f"{given} {more} {kept}", strategy, directory=folder)
    assert trainer.metrics["val/accuracy"] >= 0.5
    return weights(trainer.task)


@pytest.mark.parametrize("strategy", [DataParallel(3, "cpu"), DDP(2, "cpu")])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_replicas_classify_texts_of_any_length_as_one_does(reviews, strategy, name):
    wanted = classified(CPU(), reviews, name=name)
    mine = on(strategy, classified, reviews, "", name)
    # Not relative: attention does not depend on the bias of its keys, which stays nearly 0.
    assert max(abs(mine[name] - wanted[name]).max() for name in wanted) <= 1e-10


def test_a_classifier_is_left_with_the_names_of_its_classes(reviews, tmp_path):
    wanted = classified(CPU(), reviews, str(tmp_path))
    net = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained")
    assert net.config.id2label == dict(enumerate(LABELS))
    assert weights_apart({f"net.{n}": w for n, w in weights(net).items()}, wanted) == 0
    assert (tmp_path / "pretrained" / "tokenizer.json").is_file()


def test_the_commands_of_the_page_run(reviews, tmp_path):
    for name, file in (("chats", "chats"), ("held_out", "chats"), ("reviews", "reviews")):
        shutil.copy(reviews / f"{file}.jsonl", tmp_path / f"{name}.jsonl")
    models = {"Qwen/Qwen3-0.6B": "qwen3", "distilbert/distilbert-base-uncased": "bert"}
    short = "data.length=40 trainer.max_steps=2 trainer.accelerator=cpu logger=none"
    left = {}
    for line in commands_of("docs/huggingface.md"):
        if "--help" not in line:
            for name, folder in models.items():
                line = line.replace(name, str(reviews / folder))
            asked = ["callbacks.answers.questions=[count to 3]"] * ("recipe=sft" in line)
            words = [*shlex.split(line), *short.split(), *asked]
            done = run(words, tmp_path, HF_HUB_OFFLINE="1")
            assert done.returncode == 0, done.stderr
            found = re.search(r"^pretrained +(outputs/\w+/.+/pretrained)$", done.stdout, re.M)
            left[line] = tmp_path / found[1]
            assert ("\nquestion   count to 3\nanswer " in done.stdout) == bool(asked)
            assert ("\ntrain      11 chats of " in done.stdout) == bool(asked)
    assert len(left) == 6
    (by_parts,) = (folder for line, folder in left.items() if "strategy=fsdp" in line)
    whole, parts = (
        load_file(f / "model.safetensors") for f in (next(iter(left.values())), by_parts)
    )
    assert all(torch.allclose(parts[name], whole[name], atol=1e-6) for name in whole)


def test_a_name_that_is_not_found_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^task\.model=no/body: We couldn't connect to"):
        model_of("AutoModelForCausalLM", "no/body", None, {})


@pytest.mark.parametrize(
    "row, said",
    [
        ({"label": 0}, "{at} has no text under text; set data.text"),
        (
            {"text": "a", "label": 2},
            "{at} has 2 under label, which is none of negative, pos",
        ),
        ("a", '{at} is not a JSON object: "a"'),
    ],
)
def test_a_line_without_a_text_and_its_label_is_refused(reviews, tmp_path, row, said):
    file = tmp_path / "one.jsonl"
    good = json.dumps({"text": "a\u2028b", "label": 1}, ensure_ascii=False)
    file.write_text(f"{good}\n{json.dumps(row)}\n")
    data = TextData(str(reviews / "bert"), LABELS, str(file))
    with pytest.raises(UserError) as caught:
        data.setup()
    assert str(caught.value).startswith(said.format(at=f"{file}, line 2"))
