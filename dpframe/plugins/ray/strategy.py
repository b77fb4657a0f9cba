"""One process a replica on the machines of a Ray cluster: ddp, in workers that Ray Train starts."""

import io
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpframe import Logger, UserError
from dpframe.checkpoint import seal
from dpframe.errors import Interrupted
from dpframe.launch.rank import Parent, do_work, fail, has_parent
from dpframe.launch.rank_errors import Fault, explain
from dpframe.launch.signals import SIGNALS, Interruption
from dpframe.plugin import REHEARSED_REPLICAS, Failure, Gpus, environment, first_line, signals
from dpframe.strategies import DDP
from dpframe.strategies.devices import announce
from dpframe.strategies.processes import backend_of

ONE_CPU: dict[str, float] = {"CPU": 1}
TICK_SECONDS = 0.2  # between two looks at what the ranks have said
CONNECT_SECONDS = 5.0
REPORT_SECONDS = 5.0  # between two rows for Ray, which reads them every few seconds
# For the processes of Ray: a cluster that is started here sends nobody its statistics, and what a
# rank prints and logs is in Ray's files as it is.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


class Ray(DDP):
    """ddp whose ranks are workers of Ray Train."""

    spans_machines = True

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        *,
        resources: dict[str, float] = ONE_CPU,
        storage: str | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(
            gpus,
            accelerator,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            timeout_seconds=timeout_seconds,
        )
        if not (gpus in (None, "auto", "all") or isinstance(gpus, int)):
            raise UserError(
                f"trainer.gpus={gpus} names GPUs, and under strategy=ray Ray chooses them; use a "
                "number, e.g. trainer.gpus=2"
            )
        self.resources = dict(resources)
        self.storage = storage

    # ---- in the program that starts the ranks

    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Has Ray Train start the ranks; ends with the first one that fails."""
        if environment.is_rank():
            raise UserError(
                "strategy=ray has Ray start the ranks, but torchrun has started this one; start "
                "it without torchrun, or use strategy=ddp"
            )
        train = _ray_train()
        signals.raise_if_signaled()
        stop = signals.current() or Interruption()
        nowhere = tempfile.TemporaryDirectory(prefix="dpframe_ray_")
        with stop.left_to_launcher(), _connected(), nowhere as folder:
            signals.raise_if_signaled()  # Ray takes seconds to start
            count, uses_gpus = self._workers()
            kind = "cuda" if self.accelerator == "auto" else self.accelerator
            device = torch.device(kind if uses_gpus else "cpu")
            announce([device] * count, self.accelerator, kind="Ray worker")
            job = _Job(stop, count)
            work = pickle.dumps((run, args))
            timeout = max(1, round(self.timeout_seconds))
            trainer = train.torch.TorchTrainer(
                _Worker(job.messages, job.signals, os.getcwd(), list(sys.path), work),
                torch_config=train.torch.TorchConfig(backend_of(device), timeout_s=timeout),
                scaling_config=train.ScalingConfig(
                    num_workers=count, use_gpu=uses_gpus, resources_per_worker=self.resources
                ),
                run_config=train.RunConfig(storage_path=self._storage() or folder),
            )
            job.watch(trainer)
            return job.outcome()

    def _storage(self) -> str | None:
        """As Ray takes it: a URI that can be opened, or an absolute path."""
        if self.storage is None or "://" not in self.storage:
            return self.storage and os.path.abspath(os.path.expanduser(self.storage))
        from pyarrow.fs import FileSystem  # with which Ray Train opens it, too

        try:
            FileSystem.from_uri(self.storage)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"strategy.storage={self.storage} can't be opened: {first_line(error)}; fix that, "
                "or use a directory that all nodes share"
            ) from None
        return self.storage

    def _workers(self) -> tuple[int, bool]:
        """How many, and whether with a GPU each; refuses more than the cluster has room for, as Ray
        would wait for ever."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes)) if self.accelerator != "cpu" else 0
        needs = self.resources | ({"GPU": 1.0} if gpus else {})
        total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU", *needs)}
        there = f"the Ray cluster has {_list(total)} on {len(nodes)} node{'s' * (len(nodes) > 1)}"
        if self.accelerator not in ("auto", "cpu") and not gpus:
            raise UserError(
                f"trainer.accelerator={self.accelerator} but {there}; "
                "use trainer.accelerator=auto, or cpu to rehearse"
            )
        count = self.gpus if isinstance(self.gpus, int) else gpus or REHEARSED_REPLICAS
        room = sum(
            min(int(node.get(name, 0) // need) for name, need in needs.items() if need)
            for node in nodes
        )
        if room < count:
            fix = f"use trainer.gpus={room}, " if room else "set strategy.resources to less, "
            raise UserError(
                f"trainer.gpus={count} needs {count} workers of {_list(needs)} each, "
                f"and {there}, so room for {room}; {fix}or add nodes"
            )
        return count, gpus > 0

    # ---- in a rank

    def choose_devices(self, *, default: int | None) -> list[torch.device]:
        if has_parent():
            self.gpus = None  # it counts the workers of all nodes: here are as many as Ray starts
        elif find_spec("ray") is None:
            _ray_train()  # which says what is missing
        return super().choose_devices(default=default)

    def setup(self) -> None:
        """Joins the process group that Ray has made."""
        super().setup()
        timeout = timedelta(seconds=self.timeout_seconds)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        self._store = dist.PrefixStore("dpframe", store)

    def abort(self, error: BaseException) -> None:
        """Once a worker is gone, Ray takes the process group from the others, which then fail."""
        fail(error, is_late=not dist.is_initialized())
        super().abort(error)

    def logger(self, loggers: list[Logger]) -> list[Logger]:
        """In all ranks there is one that reports to Ray, as these do so together."""
        return [*super().logger(loggers), RayLogger(self)]


class RayLogger(Logger):
    """Hands Ray the numbers of epochs and validations, and the newest checkpoint with them if there
    is a `strategy.storage`. It is the same ranks' step at which all of them do so."""

    def __init__(self, strategy: Ray) -> None:
        self._strategy = strategy
        self._keeps = strategy.storage is not None and strategy.is_main
        self._reported_at = 0.0
        self._rows: dict[str, float] = {}

    def open(self, run_dir: str, **_: Any) -> None:
        self._folder = Path(run_dir, "checkpoints")
        self._keeps = self._keeps and bool(run_dir)
        self._reported = ""  # what checkpoint, by its time

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        if numbers := {name: x for name, x in scalars.items() if not name.startswith("step/")}:
            self._rows |= {**numbers, "step": step}
            is_due = time.monotonic() - self._reported_at >= REPORT_SECONDS
            if self._strategy.collectives.broadcast(is_due):  # by the main process's clock
                self._report()

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        if succeeded and (metrics or self._rows):
            self._rows |= metrics
            self._report()

    def _report(self) -> None:
        from ray import train

        self._reported_at = time.monotonic()
        path = seal.newest_good(self._folder) if self._keeps else None
        if path is None or (name := f"{path} {path.stat().st_mtime_ns}") == self._reported:
            train.report(self._rows)
            return
        self._reported = name
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="ray_") as folder:
            os.link(path, Path(folder, path.name))  # it may be replaced while Ray copies it
            train.report(self._rows, checkpoint=train.Checkpoint.from_directory(folder))


# ---- the job, in the program that started it


class _Job:
    """Hears what the ranks say until Ray says that all is over, and passes signals on to them."""

    def __init__(self, stop: Interruption, count: int) -> None:
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        own = ray.get_runtime_context().get_node_id()  # they end with no other node
        here = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(own, False)}
        self.messages = Queue(actor_options=here)  # from the ranks
        self.signals = Queue(actor_options=here)  # one for each rank
        self.stop = stop
        self.silent = set(range(count))  # ranks that have not said how they ended
        self.number: int | None = None  # of the signal that ends the job
        self.said = ""  # when it came, in the main rank's words
        self.told: dict[str, Any] = {}
        self.value: Any = None
        self.faults: list[Fault] = []
        self.error: Exception | None = None  # Ray's

    def watch(self, trainer: Any) -> None:
        """On a thread, as `fit` would take over ctrl-c on this one."""
        thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        thread.start()
        deadline = float("inf")
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(TICK_SECONDS)
            if self.stop.number is not None and self.number is None:
                self.number = self.stop.number
                deadline = time.monotonic() + self.stop.grace_seconds
                self.signals.put_nowait_batch([self.number] * len(self.silent))
            self._hear()
        if thread.is_alive():
            self.said = signals.describe_lateness(self.stop.grace_seconds)
        self._hear()

    def outcome(self) -> Any:
        is_known = not all(fault.is_consequence for fault in self.faults)
        if self.number is not None and not is_known:
            raise Interrupted(self.number, self.said)
        if self.error is None:
            return self.value
        of_workers: dict[int, Exception] = getattr(self.error, "worker_failures", {})
        if of_workers or self.faults:
            for rank in sorted(self.silent):  # what the others have to say comes of this
                text = str(of_workers.get(rank, "its process or its node is gone"))
                self.faults.append(Fault(rank, text, is_consequence=is_known))
            fault = explain(self.faults)
            fault.told = self.told
            raise fault from None
        raise Failure(f"Ray Train failed: {first_line(self.error)}") from self.error

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:
            self.error = error

    def _hear(self) -> None:
        for rank, message in self.messages.get_nowait_batch(self.messages.qsize()):
            kind, value = pickle.loads(message)
            match kind:
                case "printed":
                    stream, text = value
                    print(text, end="", file=getattr(sys, stream), flush=True)
                case "told":
                    self.told[value[0]] = value[1]
                case "failed":
                    self.faults.append(value)
                case "interrupted" if rank == 0:
                    self.said = value[1]
                case "done" if rank == 0:
                    self.value = value
            if kind in ("failed", "done", "interrupted"):
                self.silent.discard(rank)


@contextmanager
def _connected() -> Iterator[None]:
    """To RAY_ADDRESS, the cluster on this machine, or one of this machine alone that ends with the
    block; or to what the program has connected to."""
    import ray

    if ray.is_initialized():
        yield
        return
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    _refuse_unreachable(os.environ.get("RAY_ADDRESS", ""))
    try:
        os.environ.update(VARIABLES | before)
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except SystemExit:  # of Ray's own handler
            if stop := signals.current():
                stop.remember(signal.SIGTERM)
            raise Interrupted(signal.SIGTERM) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = (
                "if the cluster asks for a token, export RAY_AUTH_MODE=token, with that token here"
            )
            raise UserError(f"Ray does not start: {first_line(error)}; {hint}") from None
        finally:
            _handle(handlers)  # Ray takes SIGTERM over
        yield
    finally:
        ray.shutdown()
        _handle(handlers)
        os.environ.clear()
        os.environ.update(before)


def _refuse_unreachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():  # else none, or auto
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address} can't be reached: {error.strerror or error}; use HOST:6379 of "
            "a cluster that ray start --head has started, or unset it for one of this machine"
        ) from None


def _handle(handlers: Mapping[Any, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ray_train() -> Any:
    try:
        import ray.train.torch
    except ImportError as error:
        raise UserError(
            f"strategy=ray needs Ray Train ({error}): pip install 'dpframe[ray]'"
        ) from None
    return ray.train


def _list(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


# ---- in a worker


@dataclass(eq=False)
class _Worker:
    """What Ray Train calls in each worker, on a thread: signals come by a queue."""

    messages: Any
    signals: Any
    directory: str
    path: list[str]
    work: bytes

    def __call__(self) -> None:
        import ray

        for name in logging.root.manager.loggerDict:  # they tell each report at length
            if name.startswith(("ray.", os.path.dirname(ray.__file__))):
                logging.getLogger(name).setLevel(logging.WARNING)
        rank = int(os.environ["RANK"])
        parent = Parent(_Line(self.messages, rank))
        signals.install(parent)
        wait = threading.Thread(target=lambda: parent.remember(self.signals.get()), daemon=True)
        wait.start()
        sys.path.extend(folder for folder in self.path if folder not in sys.path)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)  # Ray has a folder of its own
        out, err = (_Stream(parent, name) for name in ("stdout", "stderr"))
        with out, err, redirect_stdout(out), redirect_stderr(err):
            code = do_work(parent, self.work)
        if code:
            raise RuntimeError(f"rank {rank} has failed")  # its words are on their way


@dataclass
class _Line:
    """What a rank's parent takes for a connection."""

    messages: Any
    rank: int

    def send_bytes(self, message: bytes) -> None:
        self.messages.put((self.rank, message))


class _Stream(io.TextIOBase):
    """Sends the program whole lines of what is printed, which Ray would give another form."""

    def __init__(self, parent: Parent, name: str) -> None:
        self._parent = parent
        self._name = name
        self._text = ""

    def write(self, text: str) -> int:
        self._text += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._text = self._text, ""
        if text:
            self._parent.send("printed", (self._name, text))
