"""One process a replica on the machines of a Ray cluster: ddp, in workers that Ray Train starts."""

import io
import logging
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpframe.checkpoint import seal
from dpframe.errors import Failure, Interrupted, NodeLost, UserError, first_line
from dpframe.launch import environment, signals
from dpframe.launch.faults import Fault, explain
from dpframe.launch.rank import Parent, do_work, fail, has_parent, set_parent
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import SIGNALS
from dpframe.loggers import Logger
from dpframe.strategies.ddp import DDP
from dpframe.strategies.devices import REHEARSED_REPLICAS, Gpus, announce, choose
from dpframe.strategies.processes import backend_of

ONE_CPU: dict[str, float] = {"CPU": 1}
TICK_SECONDS = 0.2  # between two looks at what the ranks have said
WAIT_SECONDS = 15.0  # for the first word of a rank, before it is told what Ray waits for
CONNECT_SECONDS = 5.0
LOST_SECONDS = 20.0  # for Ray to notice that a node is gone
REPORT_SECONDS = 5.0  # between two rows for Ray, which reads them every few seconds
# Ray's own variables, for the processes of a job: how soon a failure is seen, and that what is
# printed and logged there is shown once, by us.
VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


class Ray(DDP):
    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        max_replicas_per_core: int = 8,
        *,
        resources: dict[str, float] = ONE_CPU,
        storage: str | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(
            gpus,
            accelerator,
            max_replicas_per_core,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            sync_batchnorm=sync_batchnorm,
            timeout_seconds=timeout_seconds,
        )
        if not (gpus in (None, "auto", "all") or isinstance(gpus, int)):
            raise UserError(
                f"trainer.gpus={gpus} names GPUs, and under strategy=ray Ray chooses them; use a "
                "number, e.g. trainer.gpus=2"
            )
        if gpus == 0:
            raise UserError("trainer.gpus=0 is no worker of Ray's; use 1 or more")
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
        with stop.left_to_launcher(), _connected():
            signals.raise_if_signaled()  # Ray takes seconds to start
            count, needs = self._workers()
            uses_gpus = "GPU" in needs
            kind = "cuda" if self.accelerator == "auto" else self.accelerator
            device = torch.device(kind if uses_gpus else "cpu")
            announce([device] * count, self.accelerator, kind="Ray worker")
            storage = self._storage()
            job = _Job(stop, count, needs)
            with tempfile.TemporaryDirectory(prefix="dpframe_ray_") as nowhere:
                work = pickle.dumps((run, args))
                trainer = train.torch.TorchTrainer(
                    _Worker(job.messages, job.signals, os.getcwd(), list(sys.path), work),
                    torch_config=train.torch.TorchConfig(
                        backend=backend_of(device),
                        timeout_s=max(1, round(self.timeout_seconds)),
                    ),
                    scaling_config=train.ScalingConfig(
                        num_workers=count, use_gpu=uses_gpus, resources_per_worker=self.resources
                    ),
                    run_config=train.RunConfig(storage_path=storage or nowhere),
                )
                job.watch(trainer)
            return job.outcome()

    def _storage(self) -> str | None:
        """The storage as Ray takes it: a URI that can be opened, or an absolute path."""
        if self.storage is None:
            return None
        if "://" not in self.storage:
            return os.path.abspath(os.path.expanduser(self.storage))
        from pyarrow.fs import FileSystem  # with which Ray Train opens it, too

        try:
            FileSystem.from_uri(self.storage)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"strategy.storage={self.storage} can't be opened: {first_line(error)}; fix that, "
                "or use a directory that all nodes share"
            ) from None
        return self.storage

    def _workers(self) -> tuple[int, dict[str, float]]:
        """How many, and what each needs; refuses more than the cluster has room for, as Ray would
        wait for ever."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes)) if self.accelerator != "cpu" else 0
        needs = self.resources | ({"GPU": 1.0} if gpus else {})
        total = _in_words(ray.cluster_resources(), {"CPU": 0, "GPU": 0} | needs)
        there = f"the Ray cluster has {total} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        if self.accelerator not in ("auto", "cpu") and not gpus:
            raise UserError(
                f"trainer.accelerator={self.accelerator} but {there}; "
                "use trainer.accelerator=auto, or cpu to rehearse"
            )
        asked = self.gpus if isinstance(self.gpus, int) else None
        count = asked or gpus or REHEARSED_REPLICAS
        room = sum(_room(node, needs) for node in nodes)
        if room < count:
            fix = f"use trainer.gpus={room}, " if room else "set strategy.resources to less, "
            raise UserError(
                f"trainer.gpus={count} needs {count} workers of {_in_words(needs, needs)} each, "
                f"and {there}, so room for {room}; {fix}or add nodes"
            )
        return count, needs

    # ---- in a rank

    def choose_devices(self, *, default: int | None) -> list[torch.device]:
        """In a rank, the devices of its node: `trainer.gpus` counts the workers of all nodes."""
        if not has_parent():
            if find_spec("ray") is None:
                raise _without_ray("No module named 'ray'")
            return super().choose_devices(default=default)
        limit = self.max_replicas_per_core
        return choose(None, self.accelerator, default=default, max_per_core=limit)

    def setup(self) -> None:
        """Joins the process group that Ray has made."""
        gpus, self.gpus = self.gpus, None  # of this node: as many as there are ranks
        try:
            super().setup()
        finally:
            self.gpus = gpus
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
        return [*super().logger(loggers), _Report(self)]


class _Report(Logger):
    """Hands Ray the numbers of epochs and validations, and the newest checkpoint with them if there
    is a `strategy.storage`. It is the same ranks' step at which all of them do so."""

    def __init__(self, strategy: Ray) -> None:
        self._strategy = strategy
        self._folder: Path | None = None
        self._reported_at = 0.0
        self._reported = ""  # what file, by its time
        self._rows: dict[str, float] = {}

    def open(self, run_dir: str, **_: Any) -> None:
        self._folder = Path(run_dir) / "checkpoints" if run_dir else None

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        numbers = {name: value for name, value in scalars.items() if not name.startswith("step/")}
        if numbers:
            self._rows = {**self._rows, **numbers, "step": step}
            since = time.monotonic() - self._reported_at
            is_due = self._strategy.is_main and since >= REPORT_SECONDS
            if any(self._strategy.collectives.sum_numbers([float(is_due)])):
                self._report()

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        if succeeded and (metrics or self._rows):
            self._rows.update(metrics)
            self._report()

    def _report(self) -> None:
        from ray import train

        self._reported_at = time.monotonic()
        path = self._newest()
        if path is None:
            train.report(self._rows)
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="ray_") as folder:
            os.link(path, Path(folder, path.name))  # it may be replaced while Ray copies it
            train.report(self._rows, checkpoint=train.Checkpoint.from_directory(folder))

    def _newest(self) -> Path | None:
        """The checkpoint that the main process has not handed over yet."""
        if self._strategy.storage is None or self._folder is None or not self._strategy.is_main:
            return None
        path = seal.newest_good(self._folder)
        if path is None or (name := f"{path} {path.stat().st_mtime_ns}") == self._reported:
            return None
        self._reported = name
        return path


# ---- the job, in the program that started it


class _Job:
    def __init__(self, stop: Interruption, count: int, needs: Mapping[str, float]) -> None:
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.stop = stop
        self.count = count
        free = ray.available_resources()
        lacks = any(free.get(name, 0) < count * need for name, need in needs.items())
        self.waits_for = f"the cluster has {_in_words(free, needs)} free" if lacks else ""
        own = ray.get_runtime_context().get_node_id()  # they end with no other node
        here = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(own, False)}
        self.messages = Queue(actor_options=here)  # from the ranks
        self.signals = Queue(actor_options=here)  # one for each rank
        self.number: int | None = None  # of the signal that ends the job
        self.said = ""  # when it came, in the main rank's words
        self.told: dict[str, Any] = {}
        self.value: Any = None
        self.faults: dict[int, Fault] = {}
        self.nodes: dict[int, tuple[str, str]] = {}  # of the ranks: Ray's name, and the host's
        self.ended: set[int] = set()
        self._error: Exception | None = None  # Ray's
        self._deadline = float("inf")

    def watch(self, trainer: Any) -> None:
        """Until Ray says that it is over, or a signal's time is up. `fit` is called on a thread, as
        it would take over ctrl-c on this one."""
        thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        thread.start()
        began = time.monotonic()
        while thread.is_alive() and time.monotonic() < self._deadline:
            thread.join(TICK_SECONDS)
            self._heed_signals()
            self._hear()
            if self.waits_for and time.monotonic() - began > WAIT_SECONDS:
                print(f"waiting for {self.count} workers: {self.waits_for}", file=sys.stderr)
                self.waits_for = ""
        if thread.is_alive():
            self.said = signals.describe_lateness(self.stop.grace_seconds)
        self._hear()

    def outcome(self) -> Any:
        from ray.train import WorkerGroupError

        if self.number is not None and all(fault.is_consequence for fault in self.faults.values()):
            raise Interrupted(self.number, self.said)
        for rank, host in self._lost():
            line = f"rank {rank} is lost: its node {host} is down, or its network is cut"
            self.faults[rank] = Fault(rank, line, line=line, kind=NodeLost)
        for rank, error in getattr(self._error, "worker_failures", {}).items():
            if rank not in self.ended and rank not in self.faults:
                # What other ranks have to say comes of this.
                is_consequence = not all(fault.is_consequence for fault in self.faults.values())
                line = f"its process or its node is gone: {_end_of(error)}"
                self.faults[rank] = Fault(rank, line, is_consequence=is_consequence)
        if self.faults:
            fault = explain(list(self.faults.values()))
            fault.told = self.told
            raise fault from None
        if self._error is not None:
            what = "lost its workers" if isinstance(self._error, WorkerGroupError) else "failed"
            raise Failure(f"Ray Train {what}: {_cause(self._error)}") from self._error
        return self.value

    def _lost(self) -> list[tuple[int, str]]:
        """The silent ranks whose nodes are gone, which Ray notices late, where the others only
        missed somebody."""
        import ray

        silent = {r: n for r, n in self.nodes.items() if r not in self.ended | self.faults.keys()}
        until = time.monotonic() + LOST_SECONDS
        while (
            silent and self._error and all(fault.is_consequence for fault in self.faults.values())
        ):
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            lost = [(rank, host) for rank, (node, host) in silent.items() if node not in alive]
            if lost or time.monotonic() > until:
                return lost
            time.sleep(TICK_SECONDS)
        return []

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except Exception as error:
            self._error = error

    def _hear(self) -> None:
        for rank, line in self.messages.get_nowait_batch(self.messages.qsize()):
            self.waits_for = ""  # they have started
            if isinstance(line, bytes):
                self._read(rank, *pickle.loads(line))
            else:
                stream, text = line
                print(text, end="", file=getattr(sys, stream), flush=True)

    def _read(self, rank: int, kind: str, value: Any) -> None:
        match kind:
            case "told":
                self.told[value[0]] = value[1]
            case "node":
                self.nodes[rank] = value
            case "failed":
                self.faults.setdefault(rank, value)
            case "interrupted" if rank == 0:
                self.said = value[1]
            case "done" if rank == 0:
                self.value = value
        if kind in ("done", "interrupted"):
            self.ended.add(rank)

    def _heed_signals(self) -> None:
        if self.stop.number is not None and self.number is None:
            self.number = self.stop.number
            self._deadline = time.monotonic() + self.stop.grace_seconds
            self.signals.put_nowait_batch([self.number] * self.count)
        if self.stop.is_to_pause:  # of this program alone: the cluster goes on
            self.stop.stop_here()


@contextmanager
def _connected() -> Iterator[None]:
    """To RAY_ADDRESS, the cluster on this machine, or one of this machine alone that ends with the
    block; or to what the program has connected to."""
    import ray

    if ray.is_initialized():
        yield
        return
    before = dict(os.environ)
    # A cluster that is started here sends nobody its statistics, unless that is wanted.
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", **VARIABLES}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        os.environ.update({name: os.environ.get(name, value) for name, value in wanted.items()})
        _refuse_unreachable(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except SystemExit:  # of Ray's own handler
            if stop := signals.current():
                stop.remember(signal.SIGTERM)
            raise Interrupted(signal.SIGTERM) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            hint = "; if it asks for a token, export RAY_AUTH_MODE=token, with that token here"
            is_open = os.environ.get("RAY_AUTH_MODE", "disabled") == "disabled"
            raise UserError(
                f"Ray does not start: {first_line(error)}"
                + hint * (is_open and isinstance(error, ConnectionError))
            ) from None
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
    if address.startswith("ray://"):
        raise UserError(
            f"RAY_ADDRESS={address} is Ray Client; start dpframe on a node of the cluster, e.g. by "
            "ray job submit, or use RAY_ADDRESS=HOST:6379"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):  # none, or auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address} can't be reached: {error.strerror or error}; start a cluster "
            "by ray start --head, or unset RAY_ADDRESS for one on this machine alone"
        ) from None


def _handle(handlers: Mapping[Any, Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ray_train() -> Any:
    try:
        import ray.train.torch
    except ImportError as error:
        raise _without_ray(error) from None
    return ray.train


def _without_ray(why: object) -> UserError:
    return UserError(f"strategy=ray needs Ray Train ({why}): pip install 'dpframe[ray]'")


def _room(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many workers fit on a node."""
    return min(int(node.get(name, 0) // need) for name, need in needs.items() if need)


def _in_words(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)


def _end_of(error: BaseException) -> str:
    """What Ray knows about the end of a process; the error's first line tells only that."""
    found = re.search(r"Worker exit detail: (.+?)(?: If |$)", str(error), re.MULTILINE)
    return found[1] if found else first_line(error)


def _cause(error: BaseException) -> str:
    """The last line of a traceback from a Ray actor, else the error's first line."""
    lines = str(error).strip().splitlines()
    return lines[-1] if any(line.startswith("  File ") for line in lines) else first_line(error)


# ---- in a worker


class _Worker:
    """What Ray Train calls in each worker, on a thread: signals come by a queue."""

    def __init__(
        self, messages: Any, signals: Any, directory: str, path: list[str], work: bytes
    ) -> None:
        self.messages = messages
        self.signals = signals
        self.directory = directory
        self.path = path
        self.work = work

    def __call__(self) -> None:
        import ray

        rank = int(os.environ["RANK"])
        _quieten()
        parent = Parent(_Line(self.messages, rank))
        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        parent.send("node", (ray.get_runtime_context().get_node_id(), node))
        signals.install(parent)
        set_parent(parent)
        threading.Thread(target=self._await_signal, args=(parent,), daemon=True).start()
        sys.path.extend(folder for folder in self.path if folder not in sys.path)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)  # Ray has a folder of its own
        out, err = (_Stream(self.messages, rank, name) for name in ("stdout", "stderr"))
        with out, err, redirect_stdout(out), redirect_stderr(err):
            code = do_work(parent, self.work)
        if code:
            raise RuntimeError(f"rank {rank} has failed")  # its words are on their way

    def _await_signal(self, parent: Parent) -> None:
        parent.remember(self.signals.get())


def _quieten() -> None:
    """Ray's loggers, some of which are named by their files, tell each report at length."""
    import ray

    for name in logging.root.manager.loggerDict:
        if name.startswith(("ray.", os.path.dirname(ray.__file__))):
            logging.getLogger(name).setLevel(logging.WARNING)


class _Line:
    """What a rank's parent takes for a connection."""

    def __init__(self, messages: Any, rank: int) -> None:
        self._messages = messages
        self._rank = rank

    def send_bytes(self, message: bytes) -> None:
        self._messages.put((self._rank, message))

    def recv_bytes(self) -> bytes:
        """Ctrl-Z stops the program alone."""
        return b""


class _Stream(io.TextIOBase):
    """Sends the program whole lines of what is printed, which Ray would give another form."""

    def __init__(self, messages: Any, rank: int, name: str) -> None:
        self._messages = messages
        self._rank = rank
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
            self._messages.put((self._rank, (self._name, text)))
