"""A training script as most are: a DataLoader, a validation each epoch, and a log.

Under torchrun it has a DistributedDataParallel and DistributedSamplers; rank 0 logs.
"""

import math
import os

import problems
import torch
import torch.distributed as dist
from marks import Marks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

REPLICAS = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    parser = problems.parser(__doc__)
    parser.add_argument("--saves", action="store_true", help="a checkpoint each epoch")
    options = parser.parse_args()
    problem = problems.problem(options.images)
    torch.manual_seed(0)
    net: nn.Module = problem.network()
    sampler = held_out_sampler = None
    if REPLICAS > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(problem.train)
        held_out_sampler = DistributedSampler(problem.held_out, shuffle=False)
        net = DistributedDataParallel(net)
    size = problem.batch_size // REPLICAS
    loader = DataLoader(problem.train, size, shuffle=sampler is None, sampler=sampler)
    held_out_loader = DataLoader(problem.held_out, size, sampler=held_out_sampler)
    optimizer = problem.optimizer(net.parameters())
    is_main = REPLICAS == 1 or dist.get_rank() == 0
    writer = SummaryWriter("runs") if is_main else None
    best = math.inf
    marks = Marks()
    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        marks.begin()
        net.train()
        total, rows = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = problem.loss(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            rows += len(x)
        train_loss = mean(total, rows)
        marks.train()
        val_loss = validate(net, held_out_loader, problem.loss)
        if writer is not None:
            writer.add_scalar("train/loss", train_loss, epoch)
            writer.add_scalar("val/loss", val_loss, epoch)
            print(f"epoch {epoch + 1}: loss {train_loss:.4f}, val {val_loss:.4f}", flush=True)
        if options.saves:
            best = min(best, val_loss)
            save(net, optimizer, epoch, is_best=best == val_loss)
        marks.end()
    if writer is not None:
        writer.close()
        torch.save(net.state_dict(), "weights.pt")
    marks.tell(loss=train_loss, steps_per_epoch=len(loader))
    if isinstance(net, DistributedDataParallel):
        # Torch aborts now and then where the reducer outlives its process group.
        net.reducer = net.logger = None  # type: ignore[assignment]
        dist.destroy_process_group()


def validate(net: nn.Module, loader: DataLoader, loss: problems.Loss) -> float:
    net.eval()
    total, rows = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += loss(net(x), y).item() * len(x)
            rows += len(x)
    return mean(total, rows)


def mean(total: float, rows: int) -> float:
    if REPLICAS == 1:
        return total / rows
    sums: Tensor = torch.tensor([total, rows])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(net: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, *, is_best: bool) -> None:
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "last.pt")
    if is_best:
        torch.save(state, "best.pt")


if __name__ == "__main__":
    main()
