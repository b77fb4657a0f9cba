"""LeNet as most scripts have it: a DataLoader over tensors, SGD, a validation that is logged."""

import sys
from pathlib import Path

import images
import torch
from marks import Marks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    torch.manual_seed(0)
    train, test = images.datasets(Path(sys.argv[1]))
    loader = DataLoader(train, batch_size=images.BATCH_SIZE, shuffle=True)
    net = images.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=images.LEARNING_RATE)
    writer = SummaryWriter("runs")
    marks = Marks()
    for epoch in range(int(sys.argv[2])):
        marks.begin()
        net.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        marks.train()
        accuracy = validate(net, DataLoader(test, batch_size=images.BATCH_SIZE))
        writer.add_scalar("train/loss", total / len(train), epoch)
        writer.add_scalar("val/accuracy", accuracy, epoch)
        print(f"epoch {epoch + 1}: loss {total / len(train):.4f}, accuracy {accuracy:.3f}")
        torch.save(net.state_dict(), "lenet.pt")
        marks.end()
    writer.close()
    marks.tell(loss=total / len(train), accuracy=accuracy, steps_per_epoch=len(loader))


def validate(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    right, rows = 0, 0
    with torch.no_grad():
        for x, y in loader:
            right += (net(x).argmax(dim=1) == y).sum().item()
            rows += len(x)
    return right / rows


if __name__ == "__main__":
    main()
