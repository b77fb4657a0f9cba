"""`prepare_data` is called once on each machine, before any of its processes reads."""

import errno
import fcntl
import io
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import forked
import pytest
import torch
from command import write
from small import Rows, trainer
from test_readme import files_of
from test_torchrun import agents, torchrun
from torch.distributed import DistStoreError, HashStore

import dpframe
from dpframe import DataModule, Strategy, UserError
from dpframe.data.preparation import call_prepare_data
from dpframe.launch import signals, watchdog
from dpframe.launch.rank import Parent
from dpframe.strategies import group
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU


class Prepared(Rows):
    """Writes down who prepared, and what `setup` has found."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        with (self.folder / "prepared").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def setup(self) -> None:
        (self.folder / f"set-up-{os.getpid()}").write_text((self.folder / "prepared").read_text())


def prepared(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "prepared").read_text().split()]


@pytest.mark.parametrize("mode", ["fit", "validate", "test", "predict"])
def test_every_mode_has_it_called_before_setup(mode, tmp_path):
    getattr(trainer(data=Prepared(tmp_path), max_epochs=1), mode)()
    assert prepared(tmp_path) == [os.getpid()]
    assert (tmp_path / f"set-up-{os.getpid()}").exists()


def test_each_trainer_has_it_called_once(tmp_path):
    data = Prepared(tmp_path)
    for _ in range(2):
        made = trainer(data=data, max_epochs=1)
        made.fit()
        made.validate()
    assert len(prepared(tmp_path)) == 2


class Late(Prepared):
    """Prepares when the other rank waits for it, and draws random numbers."""

    def prepare_data(self) -> None:
        while not (self.folder / "waits-1").exists():
            time.sleep(0.001)
        random.random()
        torch.rand(3)
        super().prepare_data()


def in_rank(strategy: Strategy, make: Callable[[Path], DataModule], folder: Path) -> list[Any]:
    def pause(seconds: float) -> None:
        (folder / f"waits-{os.environ['RANK']}").touch()
        time.sleep(seconds)

    with patch.object(group, "time", SimpleNamespace(sleep=pause)):
        made = trainer(data=make(folder), strategy=strategy, max_epochs=1)
    drawn = random.random(), float(torch.rand(()))
    made.fit()
    return strategy.collectives.gather((os.getpid(), drawn, made.metrics["train/loss"]))


def test_ranks_wait_for_the_first_one_and_draw_alike_after_it(tmp_path):
    one, other = forked.on(DDP(2, "cpu"), in_rank, Late, tmp_path)
    assert prepared(tmp_path) == [one[0]]
    for pid, *_ in (one, other):
        assert (tmp_path / f"set-up-{pid}").read_text() == f"{one[0]}\n"
    assert one[1:] == other[1:]
    (alone,) = forked.on(CPU(), in_rank, Prepared, tmp_path)
    assert alone[1] == one[1]


def in_slow_rank(strategy: Strategy, folder: Path) -> list[Any]:
    """The first rank prepares for longer than a collective may take."""
    begun: list[str] = []

    def work() -> None:
        begun.append("begun")
        with pytest.raises(DistStoreError):
            HashStore().wait(["never"], timedelta(seconds=5))

    strategy.collectives.once(work)
    return strategy.collectives.gather(begun)


def test_no_time_limit_of_collectives_ends_the_wait(tmp_path):
    assert forked.on(DDP(2, "cpu", timeout_seconds=4), in_slow_rank, tmp_path) == [["begun"], []]


# ---- how a job ends whose preparation does not

FAILING = """
import os
import signal
import time
from pathlib import Path

import dpframe
from small import Rows


class Failing(Rows):
    def __init__(self, how: str = "raise"):
        super().__init__()
        self.how = how

    def prepare_data(self):
        Path(f"preparing-{os.environ.get('RANK', 0)}").touch()
        if self.how == "set":
            self.names = ["a"]
        if self.how == "refuse":
            raise dpframe.UserError("there is no network; copy the file")
        if self.how == "raise":
            raise ValueError("no such page")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.how == "hang":
            time.sleep(0.01)

    def setup(self):
        Path("set-up").touch()
"""
CONFIG = """
# @package _global_
recipe: failing
task: {_target_: small.Small}
data: {_target_: failing.Failing}
trainer: {max_epochs: 1, accelerator: cpu}
"""
TWO = "strategy=ddp", "trainer.gpus=2"


def words(folder: Path, *more: str) -> list[str]:
    write(folder, {"failing.py": FAILING, "recipe/failing.yaml": CONFIG})
    return [f"--config-dir={folder}", "recipe=failing", "logger=none", *more]


@pytest.mark.parametrize("where", [(), TWO], ids=["cpu", "ddp"])
def test_a_failure_of_it_is_that_of_the_job(where, tmp_path):
    done = forked.run(words(tmp_path, *where), tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no such page"), done.stderr
    assert not (tmp_path / "set-up").exists() and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("where", [(), TWO], ids=["cpu", "ddp"])
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("refuse", "there is no network; copy the file"),
        ("set", "Failing.prepare_data sets self.names, which no other process would have: it runs "
         "in one process of each machine; write files there, and read them in setup"),
    ],
)  # fmt: skip
def test_a_mistake_in_it_is_one_line(where, how, line, tmp_path):
    done = forked.run(words(tmp_path, *where, f"data.how={how}"), tmp_path)
    assert (done.returncode, done.stderr) == (2, f"dpframe: {line}\n")
    assert not (tmp_path / "set-up").exists()


def test_a_process_that_is_killed_in_it_ends_the_job_and_has_no_lock_any_more(tmp_path):
    for _ in range(2):
        done = forked.run(words(tmp_path, *TWO, "data.how=kill"), tmp_path)
        assert done.returncode == 1
        assert "killed by SIGKILL" in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / "set-up").exists()


@pytest.mark.parametrize("where", [(), TWO], ids=["cpu", "ddp"])
def test_ctrl_c_in_it_ends_the_job(where, tmp_path):
    with forked.started(words(tmp_path, *where, "data.how=hang"), tmp_path) as job:
        job.wait_for("preparing-0")
        os.killpg(job.pid, signal.SIGINT)
        code, said = job.ended()
    assert (code, said[-1:]) == (130, ["dpframe: interrupted by SIGINT"]), said
    assert not (tmp_path / "set-up").exists()


def test_a_rank_is_not_watched_while_it_prepares_or_waits():
    sent: list[Any] = []
    rank = Parent(None)
    rank.send = lambda kind, value=None: sent.append((kind, value))  # type: ignore[method-assign]
    with rank.watched(9.0):
        with pytest.raises(KeyError), rank.unwatched():
            raise KeyError
        assert sent == [("watch", 9.0), ("watch", None), ("watch", 9.0)]


def test_a_program_keeps_its_own_timer(monkeypatch):
    """As pytest has one."""
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", pytest.fail)
    with watchdog.held():
        pass


@pytest.mark.parametrize("kind", ["alone", "ranks"])
def test_nobody_is_watched_while_data_are_prepared(kind, tmp_path, monkeypatch):
    events: list[str] = []
    once = {
        "alone": None,
        "ranks": lambda work: (events.append("waits"), work()),
    }[kind]

    class Watched:
        @contextmanager
        def unwatched(self) -> Iterator[None]:
            events.append("unwatched")
            yield
            events.append("watched")

    class Data(Rows):
        def prepare_data(self) -> None:
            events.append("prepares")

    monkeypatch.setattr(signals, "_current", Watched())
    call_prepare_data(Data(), once)
    within = ["prepares"] if once is None else ["waits", "prepares"]
    assert events == ["unwatched", *within, "watched"]


def test_data_without_one_pay_nothing(monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Collectives, "once", fails)
    monkeypatch.setattr(signals, "unwatched", fails)
    assert trainer(data=Rows())


# ---- other ways to read data


def test_a_program_has_it_called_in_its_ranks(tmp_path):
    data = Prepared(tmp_path)
    trainer(data=data, strategy=DDP(2, "cpu"), max_epochs=1).fit()
    assert len(prepared(tmp_path)) == 1 and prepared(tmp_path) != [os.getpid()]
    assert len(list(tmp_path.glob("set-up-*"))) == 2


# ---- locks and downloads


def holds(path: Path, marker: Path) -> None:
    with dpframe.locked(path):
        marker.touch()
        signal.pause()


def test_a_lock_lets_in_one_process_and_is_free_when_that_is_killed(tmp_path, caplog, monkeypatch):
    path, marker = tmp_path / "new/lock", tmp_path / "held"
    holder = forked.SERVER.Process(target=holds, args=(path, marker))
    holder.start()
    while not marker.exists():
        time.sleep(0.001)
    killed: list[bool] = []

    def kill(record: Any) -> None:
        killed.append(True)
        holder.kill()

    monkeypatch.setattr(caplog.handler, "emit", kill)
    with dpframe.locked(path):
        assert killed
    holder.join()
    with dpframe.locked(path):  # and by one that has left its block
        pass
    assert path.read_bytes() == b""


def test_a_lock_is_let_go_while_a_forked_child_has_its_file_open(tmp_path):
    read, write = os.pipe()
    with dpframe.locked(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until its parent closes the other end
            os._exit(0)
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(write)
    os.waitpid(child, 0)


def test_what_can_not_be_locked_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/lock", tmp_path):
        with pytest.raises(UserError, match=f"^{path} can't be locked: .*; name a file on another"):
            dpframe.locked(path).__enter__()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="No locks available; name a file on another disk$"):
        dpframe.locked(tmp_path / "lock").__enter__()


def lines() -> bytes:
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    buffer = io.BytesIO()
    torch.save((x, 3 * x), buffer)
    return buffer.getvalue()


@contextmanager
def served(content: bytes, before: Callable[[list[str]], object] = bool) -> Iterator[Any]:
    """Its address, and the paths that were asked for; `before` is called before each answer."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            before(asked)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/lines.pt", asked
        finally:
            server.shutdown()
            thread.join()


def downloading(folder: Path, url: str, digits: str, *more: str) -> list[str]:
    """The words of the guide's recipe, with another address."""
    write(folder, files_of("docs/data.md"))
    given = [f"data.url={url}", f"data.sha256='{digits}'", "logger=none", "trainer.accelerator=cpu"]
    target = "data._target_=mine.downloaded.Downloaded"
    return ["--config-dir=mine", "recipe=points", target, "hydra.run.dir=run", *given, *more]


def test_a_download_is_whole_or_not_there(tmp_path):
    content = lines()
    with served(content) as (url, asked):
        for digits, code in (("0000", 1), (sha256(content).hexdigest()[:16], 0)):
            done = forked.run(downloading(tmp_path, url, digits, *TWO), tmp_path)
            assert done.returncode == code, done.stderr
            left = ["lines.pt.lock"] if code else ["lines.pt", "lines.pt.lock"]
            assert sorted(path.name for path in (tmp_path / "data").iterdir()) == left
            if code:
                assert 'RuntimeError: invalid hash value (expected "0000"' in done.stderr
        done = forked.run(downloading(tmp_path, url, digits, "hydra.run.dir=again"), tmp_path)
        assert done.returncode == 0, done.stderr
        assert asked == ["/lines.pt"] * 2


def machine() -> None:
    """A torchrun agent of a machine that has only some disks in common with another one."""
    tempfile.tempdir = f"/tmp/{os.environ['OWN']}-{os.environ['MACHINE']}"
    os.mkdir(tempfile.tempdir)
    torchrun()


def test_of_two_machines_with_a_common_disk_one_downloads(tmp_path):
    """The server answers when the other machine asks, too, or waits for the lock."""
    content, both = lines(), []

    def wait(asked: list[str]) -> None:
        while len(asked) == 1 and not any("waiting for data/lines" in a.said() for a in both):
            time.sleep(0.01)

    with served(content, wait) as (url, asked):
        words = downloading(tmp_path, url, sha256(content).hexdigest(), "strategy=ddp")
        own = f"dpframe-test-{os.getpid()}"
        try:
            with agents(tmp_path, program=machine, line=words, OWN=own) as started:
                both.extend(started)
                assert [agent.wait() for agent in both] == [0, 0], both[0].said() + both[1].said()
        finally:
            for number in range(2):
                shutil.rmtree(f"/tmp/{own}-{number}", ignore_errors=True)
        assert asked == ["/lines.pt"]
