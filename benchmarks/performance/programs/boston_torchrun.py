"""Boston for `torchrun`: DistributedDataParallel and a DistributedSampler; rank 0 logs."""

import boston
import torch
import torch.distributed as dist
from marks import Marks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    options = boston.options(__doc__)
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, held_out = boston.datasets()
    sampler = DistributedSampler(train)
    size = boston.BATCH_SIZE // replicas
    loader = DataLoader(train, batch_size=size, sampler=sampler)
    held_out_sampler = DistributedSampler(held_out, shuffle=False)
    held_out_loader = DataLoader(held_out, batch_size=size, sampler=held_out_sampler)
    net = DistributedDataParallel(boston.network())
    optimizer = torch.optim.Adam(net.parameters(), lr=boston.LEARNING_RATE)
    writer = SummaryWriter("runs") if rank == 0 else None
    marks = Marks()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        marks.begin()
        loss = train_epoch(net, loader, optimizer)
        marks.train()
        val_loss = validate(net, held_out_loader)
        if writer is not None:
            writer.add_scalar("train/loss", loss, epoch)
            writer.add_scalar("val/loss", val_loss, epoch)
            print(f"epoch {epoch + 1}: train loss {loss:.4f}, val loss {val_loss:.4f}", flush=True)
        marks.end()
    if writer is not None:
        writer.close()
        torch.save(net.module.state_dict(), "boston.pt")
    marks.tell(loss=loss, steps_per_epoch=len(loader))
    # Torch aborts now and then where the reducer outlives its process group.
    net.reducer = net.logger = None  # type: ignore[assignment]
    dist.destroy_process_group()


def train_epoch(net: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    net.train()
    total = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
    return mean_over_ranks(total)


def validate(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total += torch.tensor([functional.mse_loss(net(x), y).item() * len(x), len(x)])
    return mean_over_ranks(total)


def mean_over_ranks(total: Tensor) -> float:
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    main()
