"""A project of lightning-hydra-template trains by the recipe that its page shows."""

import json
import re
from dataclasses import fields

import pytest
from command import ROOT, attempts, write
from command import dpframe as dpframe_command

from dpframe.trainer.settings import TrainerSettings

PAGE = (ROOT / "docs" / "from-hydra-template.md").read_text()
RECIPE = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.S | re.M)[1]
MODULE = """
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Net(nn.Module):
    def __init__(self, input_size=784, lin1_size=256, output_size=10):
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_size, lin1_size),
            nn.ReLU(),
            nn.Linear(lin1_size, output_size),
        )

    def forward(self, x):
        return self.model(x)


class Module(LightningModule):
    def __init__(self, net, optimizer, scheduler, compile):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        for kind in ("train", "val", "test"):
            setattr(self, f"{kind}_loss", MeanMetric())
            setattr(self, f"{kind}_acc", MulticlassAccuracy(10, average="micro"))
        self.val_acc_best = MaxMetric()

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def on_train_start(self):
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):
            metric.reset()

    def measured(self, kind, batch):
        x, y = batch
        logits = self.net(x)
        loss = self.criterion(logits, y)
        of_loss, of_accuracy = getattr(self, f"{kind}_loss"), getattr(self, f"{kind}_acc")
        of_loss(loss, weight=len(x))
        of_accuracy(logits.argmax(1), y)
        self.log(f"{kind}/loss", of_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{kind}/acc", of_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.measured("train", batch)

    def validation_step(self, batch, batch_idx):
        self.measured("val", batch)

    def test_step(self, batch, batch_idx):
        self.measured("test", batch)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        told = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": told}


class Data(LightningDataModule):
    def __init__(self, data_dir="data/", train_val_test_split=(40, 20, 20), batch_size=16):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = None
        self.batch_size_per_device = batch_size

    def prepare_data(self):
        print("prepares", self.hparams.data_dir)

    def setup(self, stage=None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("not divisible")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if self.data_train is None:
            drawn = torch.Generator().manual_seed(42)
            y = torch.randint(10, (80,), generator=drawn)
            x = torch.randn(80, 1, 28, 28, generator=drawn) + y[:, None, None, None] / 3
            parts = random_split(TensorDataset(x, y), self.hparams.train_val_test_split, drawn)
            self.data_train, self.data_val, self.data_test = parts

    def train_dataloader(self):
        return DataLoader(self.data_train, batch_size=self.batch_size_per_device, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data_val, batch_size=self.batch_size_per_device)

    def test_dataloader(self):
        return DataLoader(self.data_test, batch_size=self.batch_size_per_device)
"""
FILES = {
    "src/mnist.py": MODULE,
    "conf/recipe/mnist.yaml": RECIPE,
    "conf/model/mnist.yaml": """
_target_: src.mnist.Module
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
scheduler:
  _target_: torch.optim.lr_scheduler.ReduceLROnPlateau
  _partial_: true
  mode: min
  factor: 0.1
  patience: 10
net: {_target_: src.mnist.Net, input_size: 784, lin1_size: 64, output_size: 10}
compile: false
""",
    "conf/data/mnist.yaml": """
_target_: src.mnist.Data
data_dir: ${paths.data_dir}
batch_size: 15
train_val_test_split: [40, 20, 20]
""",
}
LINE = ["--config-dir", "conf", "recipe=mnist", "trainer.max_epochs=2", "trainer.precision=64"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    pytest.importorskip("lightning.pytorch", reason="needs `pip install 'dpframe[lightning]'`")
    return write(tmp_path_factory.mktemp("project"), FILES)


def numbers(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return {name: summary["metrics"][name] for name in ("train/loss", "val/loss", "val/acc_best")}


@pytest.mark.whole
def test_its_module_data_and_configs_train_as_they_are_and_alike_on_two_processes(project):
    """15 rows are not divisible by two devices, which the template refuses."""
    alone, without, misspelt = attempts(
        [
            [*LINE, "hydra.run.dir=alone", "test_after_fit=true"],
            [*LINE, "hydra.run.dir=without", "task.module.scheduler=null"],
            [*LINE, "task.module.net.lin1_sze=3"],
        ],
        project,
    )
    assert alone.code == without.code == 0, alone.err + without.err
    assert "prepares data/" in alone.out and "test/acc" in alone.out
    assert "task.module.net.lin1_sze: Net takes no such argument; did you mean" in misspelt.err
    two = ("strategy=ddp", "trainer.gpus=2", "hydra.run.dir=two", "test_after_fit=true")
    ran = dpframe_command(*LINE, *two, cwd=project)
    assert ran.returncode == 0, ran.stderr
    assert numbers(project / "two") == pytest.approx(numbers(project / "alone"), rel=1e-9)


def test_the_keys_that_the_page_names_are_there():
    ours = "\n".join(re.findall(r"^\| .* \| (.*) \|$", PAGE, re.M))
    named = set(re.findall(r"`trainer\.(\w+)", ours))
    assert len(named) > 5 and named <= {field.name for field in fields(TrainerSettings)}
    for group, options in re.findall(r"`(strategy|callbacks|experiment|logger)=\[?([\w,]+)", ours):
        for option in options.split(","):
            is_yours = (group, option) == ("experiment", "example")
            assert is_yours or (ROOT / "conf" / group / f"{option}.yaml").is_file()
