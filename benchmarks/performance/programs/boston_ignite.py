"""Boston with Ignite: its engines, TensorBoard logger and checkpoints."""

import boston
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Average, Loss
from marks import Marks
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    options = boston.options(__doc__)
    torch.manual_seed(0)
    train, held_out = boston.datasets()
    loader = DataLoader(train, batch_size=boston.BATCH_SIZE, shuffle=True)
    held_out_loader = DataLoader(held_out, batch_size=boston.BATCH_SIZE)
    net = boston.network()
    optimizer = torch.optim.Adam(net.parameters(), lr=boston.LEARNING_RATE)
    trainer = create_supervised_trainer(net, optimizer, nn.MSELoss())
    Average().attach(trainer, "loss")
    evaluator = create_supervised_evaluator(net, {"loss": Loss(nn.MSELoss())})
    marks = Marks()
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: marks.begin())
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: marks.train())
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(held_out_loader))
    objects = {"net": net, "optimizer": optimizer}
    saver = Checkpoint(objects, DiskSaver("checkpoints", require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    logger = TensorboardLogger(log_dir="runs")
    for tag, engine in (("train", trainer), ("val", evaluator)):
        logger.attach_output_handler(
            engine,
            Events.EPOCH_COMPLETED,
            tag=tag,
            metric_names=["loss"],
            global_step_transform=lambda *_: trainer.state.epoch,
        )

    @trainer.on(Events.EPOCH_COMPLETED)
    def speak(engine: Engine) -> None:
        print(f"epoch {engine.state.epoch}: {engine.state.metrics} {evaluator.state.metrics}")
        marks.end()

    trainer.run(loader, max_epochs=options.epochs)
    logger.close()
    marks.tell(loss=trainer.state.metrics["loss"], steps_per_epoch=len(loader))


if __name__ == "__main__":
    main()
