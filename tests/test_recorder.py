"""What the HPARAMS tab gets: what decides the curve, and nothing that is the same everywhere."""

from dpframe.trainer.recorder import hyperparameters

CONFIG = {
    "recipe": "boston",
    "seed": 3,
    "mode": "fit",
    "checkpoint": None,
    "task": {
        "_target_": "dpframe.recipes.boston.Boston",
        "net": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}]},
        "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.01},
        "scheduler": None,
    },
    "data": {"_target_": "dpframe.recipes.boston.BostonData", "batch_size": 128},
    "trainer": {"max_epochs": 5, "precision": "64", "skip_dynamo_import": True, "gpus": [0, 1]},
    "callbacks": {"checkpoint": {"_target_": "dpframe.callbacks.checkpoint.Checkpoint"}},
    "logger": {"csv": {"file": "metrics.csv"}},
}


def test_hyperparameters_are_what_decides_the_curve() -> None:
    assert hyperparameters(CONFIG) == {
        "recipe": "boston",
        "seed": 3,
        "task.net": "Sequential",
        "task.optimizer": "Adam",
        "task.optimizer.lr": 0.01,
        "data.batch_size": 128,
        "trainer.max_epochs": 5,
        "trainer.precision": "64",
    }


def test_the_precision_is_text_whatever_its_value() -> None:
    trainers = [{"precision": value} for value in (32, "bf16")]
    found = [hyperparameters({"trainer": each})["trainer.precision"] for each in trainers]
    assert found == ["32", "bf16"]


def test_a_run_without_a_config_has_no_hyperparameters() -> None:
    assert hyperparameters({}) == {}
