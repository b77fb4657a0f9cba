"""`mode=export`: what torch alone can load, and the interpreter that tries it."""

import importlib.util
from pathlib import Path

import forked
import pytest
import torch
from command import attempts, dpframe
from small import Rows, Small, is_same, trainer
from torch import nn

from dpframe import UserError, checkpoint, load
from dpframe.checkpoint import seal
from dpframe.errors import Failure
from dpframe.plugins.lab import export_files
from dpframe.plugins.lab.export_files import ONNX, PROGRAM, SAFETENSORS, WEIGHTS, write_files
from dpframe.recipes.boston import BostonData
from dpframe.strategies.single import SingleGPU


def test_a_trained_recipe_predicts_the_same_by_torch_alone_and_what_does_not_is_told(tmp_path):
    words = ["recipe=boston", "trainer.max_epochs=2", "hydra.run.dir=run"]
    assert dpframe(*words, cwd=tmp_path).returncode == 0
    best = "run/checkpoints/best.ckpt"
    more = ["recipe=boston", "mode=export", f"checkpoint={best}", "hydra.run.dir=there"]
    done = dpframe(*more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "takes batch[0]: float32 [rows, 13], by torch.export.load" in done.stdout
    assert "loaded without dpframe: the same outputs for 102 and 51 rows" in done.stdout
    data = BostonData()
    data.setup()
    rows = data.test_dataset().tensors[0][:7]
    wanted = load(tmp_path / best).predict_step((rows,))
    model = torch.export.load(tmp_path / "there" / PROGRAM).module()
    torch.testing.assert_close(model(rows), wanted)
    layers = nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    net = nn.Sequential(*layers)
    net.load_state_dict(torch.load(tmp_path / "there" / WEIGHTS))
    assert torch.equal(net(rows), wanted)
    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import load_file

        net.load_state_dict(load_file(tmp_path / "there" / SAFETENSORS))
        assert torch.equal(net(rows), wanted)
    with pytest.raises(Failure, match="does not load without dpframe: .+"):
        export_files._try_without_dpframe(tmp_path / "there", [PROGRAM], [([rows], wanted + 1)])


def test_a_trained_recipe_predicts_the_same_by_onnxruntime_alone(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs dpframe[onnx]")
    assert run_of(["recipe=boston", "trainer.max_epochs=1", "hydra.run.dir=run"], tmp_path)
    best = "run/checkpoints/best.ckpt"
    words = ["recipe=boston", "mode=export", f"checkpoint={best}", "hydra.run.dir=there"]
    said = run_of([*words, "export.formats=[onnx]"], tmp_path)
    assert f"there/{ONNX}  takes batch[0]: float32 [rows, 13], by onnxruntime" in said
    assert "loaded without dpframe: the same outputs for 102 and 51 rows" in said
    model = runtime.InferenceSession(str(tmp_path / "there" / ONNX))
    rows = torch.randn(7, 13)
    (got,) = model.run(None, {"batch[0]": rows.numpy()})
    wanted = load(tmp_path / best).predict_step((rows,)).detach()
    torch.testing.assert_close(torch.from_numpy(got), wanted)
    with pytest.raises(Failure, match="does not load without dpframe: .+"):
        export_files._try_without_dpframe(tmp_path / "there", [ONNX], [([rows], wanted + 1)])


class Parts(Small):
    more = ()

    def predict_step(self, batch):
        score = self.net(batch[0])
        return {"score": score, "parts": [score[:, 0], (score.argmax(1), *self.more)]}


def test_outputs_of_several_parts_are_compared_in_their_order(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs dpframe[onnx]")
    lines = write_files(trainer(Parts(), Rows()), tmp_path, ["onnx", "program"])
    assert lines[-1] == "loaded without dpframe: the same outputs for 4 and 2 rows"
    task = Parts()
    task.more = ("label",)
    with pytest.raises(Failure, match="can't take Parts.*'label'.*; leave onnx out") as raised:
        write_files(trainer(task, Rows()), tmp_path, ["onnx"])
    assert len(str(raised.value).splitlines()) == 1


def run_of(words: list[str], folder: Path) -> str:
    done = forked.run(words, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sharded_checkpoint_becomes_files_for_torch_and_a_checkpoint_that_goes_on(tmp_path):
    fsdp = ["strategy=fsdp", "trainer.gpus=2", "trainer.accelerator=cpu"]
    once = ["trainer.max_epochs=1", "trainer.precision=64", "hydra.run.dir=run"]
    run_of(["recipe=boston", *fsdp, *once], tmp_path)
    last = "run/checkpoints/last.ckpt"
    export = ["recipe=boston", "mode=export", f"checkpoint={last}", "hydra.run.dir=there"]
    said = run_of([*export, "export.formats=[weights,checkpoint]"], tmp_path)
    assert "there/checkpoints/last.ckpt  one file with all of step 4: resume=there goes on" in said
    there, state = tmp_path / "there", checkpoint.load(tmp_path / last)
    assert seal.parts_of(tmp_path / last) is not None
    assert seal.parts_of(there / "checkpoints/last.ckpt") is None
    weights = torch.load(there / WEIGHTS)
    assert is_same({f"net.{name}": weight for name, weight in weights.items()}, state["task"])
    run_of(["recipe=boston", "resume=run", "trainer.max_epochs=2"], tmp_path)
    run_of(["recipe=boston", "resume=there", "trainer.max_epochs=2", "strategy=cpu"], tmp_path)
    mine, wanted = (
        checkpoint.load(tmp_path / r / "checkpoints/last.ckpt") for r in ("there", "run")
    )
    assert mine["progress"]["global_step"] == wanted["progress"]["global_step"] == 8
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=1e-12)
    for name, weight in wanted["task"].items():
        torch.testing.assert_close(mine["task"][name], weight, rtol=1e-12, atol=1e-12)
    refused = forked.run([*export[:3], *fsdp], tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith(
        "mode=export runs in one process, without FSDP; leave strategy out: it reads the parts of "
        "a sharded checkpoint, too"
    )


class Branching(Small):
    def predict_step(self, batch):
        return self.net(batch[0]) if batch[0].sum() > 0 else batch[1]


def test_weights_of_a_task_that_torch_can_not_export_are_written_with_the_reason(tmp_path, capfd):
    made = trainer(Branching(), Rows())
    lines = write_files(made, tmp_path, None)
    assert capfd.readouterr() == ("", ""), "torch's log and graph"
    assert sum("torch.export can't take Branching.predict_step: " in line for line in lines) == 1
    assert lines[-1] == "loaded without dpframe"
    assert {path.name for path in tmp_path.iterdir()} - {SAFETENSORS} == {WEIGHTS}
    with pytest.raises(Failure, match="leave program out of export.formats$"):
        write_files(made, tmp_path, ["program"])


def test_a_file_of_an_export_before_does_not_count(tmp_path, monkeypatch):
    torch_files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    torch_files.save_file({"other": torch.ones(1)}, tmp_path / SAFETENSORS)
    monkeypatch.setattr(export_files, "_try_without_dpframe", lambda *given: f"tried {given}")
    lines = write_files(trainer(Small(), Rows()), tmp_path, ["weights"])
    assert lines[-1] == f"tried {(tmp_path, [WEIGHTS], [])}"


@pytest.mark.gpu(1)
def test_a_task_on_a_gpu_is_exported_for_the_cpu(tmp_path):
    with trainer(Small(), Rows(), strategy=SingleGPU()) as made:
        lines = write_files(made, tmp_path, ["program", "weights"])
    assert lines[-1] == "loaded without dpframe: the same outputs for 4 and 2 rows"


def test_leaves_of_a_batch_are_called_as_a_step_would():
    batch = {"image": [torch.ones(1), (torch.ones(1),)], "label": torch.ones(1)}
    named = ["batch['image'][0]", "batch['image'][1][0]", "batch['label']"]
    assert list(export_files._names(batch)) == named


def test_what_can_not_be_written_is_refused_in_one_line(tmp_path, monkeypatch):
    refused = {
        "[]": "dpframe: export.formats=[] writes nothing; name formats",
        "[tflite]": "export.formats=tflite is not one of program, weights, safetensors, onnx",
        "[checkpoint]": "writes a checkpoint as one file; name it by checkpoint=last",
    }
    lines = [["recipe=boston", "mode=export", f"export.formats={given}"] for given in refused]
    for tried, said in zip(attempts(lines, tmp_path), refused.values(), strict=True):
        assert tried.code == 2 and said in tried.err
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'dpframe\[export\]'$"):
        write_files(trainer(Small(), Rows()), tmp_path, ["safetensors"])
    with pytest.raises(UserError, match=r"onnx, onnxscript, onnxruntime: .*\[onnx\]'$"):
        write_files(trainer(Small(), Rows()), tmp_path, ["onnx"])
