"""Boston as most scripts have it: a DataLoader, Adam, a validation each epoch, and a log."""

import math

import boston
import torch
from marks import Marks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    options = boston.options(__doc__)
    torch.manual_seed(0)
    train, held_out = boston.datasets()
    loader = DataLoader(train, batch_size=boston.BATCH_SIZE, shuffle=True)
    held_out_loader = DataLoader(held_out, batch_size=boston.BATCH_SIZE)
    net = boston.network()
    optimizer = torch.optim.Adam(net.parameters(), lr=boston.LEARNING_RATE)
    writer = None if options.bare else SummaryWriter("runs")
    best = math.inf
    marks = Marks()
    for epoch in range(options.epochs):
        marks.begin()
        loss = train_epoch(net, loader, optimizer)
        marks.train()
        if writer is not None:
            val_loss = validate(net, held_out_loader)
            writer.add_scalar("train/loss", loss, epoch)
            writer.add_scalar("val/loss", val_loss, epoch)
            print(f"epoch {epoch + 1}: train loss {loss:.4f}, val loss {val_loss:.4f}", flush=True)
        if options.saves:
            best = min(best, val_loss)
            save(net, optimizer, epoch, is_best=best == val_loss)
        marks.end()
    if writer is not None:
        writer.close()
        torch.save(net.state_dict(), "boston.pt")
    marks.tell(loss=loss, steps_per_epoch=len(loader))


def train_epoch(net: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    net.train()
    total, rows = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        rows += len(x)
    return total / rows


def save(net: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, *, is_best: bool) -> None:
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "last.pt")
    if is_best:
        torch.save(state, "best.pt")


def validate(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    total, rows = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += functional.mse_loss(net(x), y).item() * len(x)
            rows += len(x)
    return total / rows


if __name__ == "__main__":
    main()
