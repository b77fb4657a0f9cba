"""Takes the README's pictures of TensorBoard: `python benchmarks/dashboard.py`, with Chromium."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import chromium, tensorboard  # noqa: E402

RUNS = {
    "normalised": [],
    "normalised_ddp_x2": ["strategy=ddp", "trainer.gpus=2"],
    "unnormalised": ["data.normalize=false"],
}
RUNS_SHOWN = "(ed%7Cx2)%24"  # not their rows of hyperparameters
TAGS = "%5E(train%7Cval)%2F(loss%7Crmse)"
SCALARS = f"#scalars&tagFilter={TAGS}&regexInput={RUNS_SHOWN}&_smoothingWeight=0"
DRAWN = "all('.plot path').slice(0, 24).filter(path => path.getAttribute('d')?.length > 300)"
PICTURES = {  # a tab, what it has once it is drawn, and the size of the picture
    "scalars": (SCALARS, f"{DRAWN}.length == 4 * {len(RUNS)}", (1500, 765)),
    "hparams": ("#hparams", "texts('.table-cell').includes('5.2955')", (1900, 500)),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in RUNS.items():
            words = ["recipe=boston", f"hydra.run.dir=outputs/boston/{name}", *overrides]
            subprocess.run([sys.executable, "-m", "dpframe", *words], cwd=folder, check=True)
        with tensorboard("outputs", Path(folder)) as when_it_shows:
            address = when_it_shows(*PICTURES)
            for name, (tab, is_there, size) in PICTURES.items():
                with chromium(Path(folder, name), size) as page:
                    page.open(address + tab)
                    page.wait_for(is_there)
                    page.screenshot(ROOT / "docs" / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
