"""A training script with Accelerate: its loader, model and optimizer, and its tracker."""

import problems
import torch
from accelerate import Accelerator
from marks import Marks
from torch.utils.data import DataLoader


def main() -> None:
    options = problems.parser(__doc__).parse_args()
    problem = problems.problem(options.images)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
    accelerator.init_trackers("run")
    net = problem.network()
    net, optimizer, loader, held_out_loader = accelerator.prepare(
        net,
        problem.optimizer(net.parameters()),
        DataLoader(problem.train, problem.batch_size, shuffle=True),
        DataLoader(problem.held_out, problem.batch_size),
    )
    marks = Marks()
    for epoch in range(options.epochs):
        marks.begin()
        net.train()
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = problem.loss(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(x)
        marks.train()
        net.eval()
        with torch.no_grad():
            losses = [problem.loss(net(x), y) * len(x) for x, y in held_out_loader]
        train_loss = total.item() / len(problem.train)
        val_loss = torch.stack(losses).sum().item() / len(problem.held_out)
        accelerator.log({"train/loss": train_loss, "val/loss": val_loss}, step=epoch)
        accelerator.save_state("checkpoint")
        accelerator.print(f"epoch {epoch + 1}: {train_loss:.4f} {val_loss:.4f}", flush=True)
        marks.end()
    accelerator.end_training()
    marks.tell(loss=train_loss, steps_per_epoch=len(loader))


if __name__ == "__main__":
    main()
