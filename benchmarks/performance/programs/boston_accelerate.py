"""Boston with Accelerate: its prepared loader, model and optimiser, and its TensorBoard tracker."""

import boston
import torch
from accelerate import Accelerator
from marks import Marks
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    options = boston.options(__doc__)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
    accelerator.init_trackers("boston")
    train, held_out = boston.datasets()
    net = boston.network()
    net, optimizer, loader, held_out_loader = accelerator.prepare(
        net,
        torch.optim.Adam(net.parameters(), lr=boston.LEARNING_RATE),
        DataLoader(train, batch_size=boston.BATCH_SIZE, shuffle=True),
        DataLoader(held_out, batch_size=boston.BATCH_SIZE),
    )
    marks = Marks()
    for epoch in range(options.epochs):
        marks.begin()
        net.train()
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)
        marks.train()
        net.eval()
        with torch.no_grad():
            errors = [functional.mse_loss(net(x), y) * len(x) for x, y in held_out_loader]
        train_loss = total.item() / len(train)
        val_loss = torch.stack(errors).sum().item() / len(held_out)
        accelerator.log({"train/loss": train_loss, "val/loss": val_loss}, step=epoch)
        accelerator.save_state("checkpoint")
        accelerator.print(f"epoch {epoch + 1}: {train_loss:.4f} {val_loss:.4f}", flush=True)
        marks.end()
    accelerator.end_training()
    marks.tell(loss=train_loss, steps_per_epoch=len(loader))


if __name__ == "__main__":
    main()
