"""Gives torch the names that its CUDA build has, and waits for torch to be imported to do so."""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

library: Any = None  # the compiled module, once torch is there
TOTAL = 80 * 2**30


def wait_for_torch() -> None:
    sys.meta_path.insert(0, Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Loads the library before torch, which looks for its hooks early, and adds what Python calls
    between torch._C and torch.cuda, which asks torch._C what kind of build this is."""

    def __init__(self) -> None:
        self.around: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "torch": (preload, finish),
            "torch.cuda": (name_what_a_cuda_build_has, lambda: None),
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.around:
            return None
        before, after = self.around.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            before()
            execute(module)
            after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def visible() -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, up to the first that is none."""
    count = int(os.environ["FAKECUDA"])
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return list(range(count))
    gpus: list[int] = []
    for word in asked.split(","):
        named = [gpu for gpu in range(count) if names(word.strip(), gpu)]
        if len(named) != 1:
            break
        gpus += named
    return gpus


def names(word: str, gpu: int) -> bool:
    if word.startswith("GPU-"):
        return f"GPU-{uuid(gpu)}".startswith(word)
    return word == str(gpu)


def uuid(gpu: int) -> str:
    return f"{gpu:08x}-fa4e-fa4e-fa4e-{gpu:012x}"


def folder() -> Path:
    return Path(os.environ["FAKECUDA_BUILD"])


def preload() -> None:
    """With the torch that is being imported: the GPUs may have been compiled in another place."""
    ctypes.CDLL(str(Path(str(sys.modules["torch"].__file__)).parent / "lib/libtorch_python.so"))
    loaded = ctypes.CDLL(str(folder() / "_gpus.so"))
    loaded.fakecuda_set_device_count(len(visible()))


def name_what_a_cuda_build_has() -> None:
    global library
    spec = importlib.util.spec_from_file_location("_gpus", folder() / "_gpus.so")
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    library.set_up(json.loads((folder() / "operators.json").read_text()))
    from torch import _C

    for name, value in {**devices(), **streams(_C), **memory(), **graphs(), **copies()}.items():
        setattr(_C, name, value)
    _C._has_cuda = True


def finish() -> None:
    """What can only be changed when torch is there."""
    import torch

    torch.cuda._device_count_nvml = library.device_count
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda.nccl.is_available = lambda tensors: False  # that is, within a process
    watch_reads_of_the_host(torch)
    resize_storages(torch)
    if torch.distributed.is_available():
        from fakecuda import nccl

        nccl.install()


# ---- torch._C, by subject


def devices() -> dict[str, Any]:
    def device_count() -> int:
        library.poison_forks()
        return library.device_count()

    def initialise() -> None:
        import torch

        if not library.device_count():
            raise RuntimeError("No CUDA GPUs are available")
        library.initialise()
        gpus = range(library.device_count())
        torch.cuda.default_generators = tuple(map(library.generator, gpus))
        torch.cuda._get_device_properties = lambda index: Properties(visible()[index])

    def lazily(call: Callable) -> Callable:
        @wraps(call)
        def initialised(*arguments: Any) -> Any:
            import torch

            torch.cuda._lazy_init()
            return call(*arguments)

        return initialised

    return {
        "_CudaDeviceProperties": Properties,
        "_cudart": SimpleNamespace(cudaMemGetInfo=free_and_total, cudaError=Error),
        "_cuda_init": initialise,
        "_cuda_isInBadFork": library.in_bad_fork,
        "_cuda_getDeviceCount": device_count,
        "_cuda_getDevice": lazily(library.get_device),
        "_cuda_setDevice": lazily(library.set_device),
        "_cuda_exchangeDevice": lazily(library.exchange_device),
        "_cuda_maybeExchangeDevice": lazily(library.maybe_exchange_device),
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_synchronize": library.synchronize,
        "_cuda_set_sync_debug_mode": library.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": library.get_sync_debug_mode,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_clearCublasWorkspaces": lambda: None,
    }


class Error:
    success = 0


class Properties:
    """Of the GPU with this number, whatever is visible."""

    def __init__(self, gpu: int) -> None:
        self.name = "FAKE CUDA"
        self.major, self.minor = 9, 0
        self.total_memory = TOTAL
        self.multi_processor_count = 132
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.max_threads_per_multi_processor = 2048
        self.shared_memory_per_multiprocessor = 233472
        self.is_integrated = self.is_multi_gpu_board = 0
        self.uuid = uuid(gpu)


def streams(_C: Any) -> dict[str, Any]:
    class StreamBase(_C.Stream):
        def __new__(cls, priority: int = 0, **given: int) -> Any:
            if "stream_id" not in given:
                _lazy_init()
                here = library.get_device()
                given = {"stream_id": library.new_stream(here), "device_index": here}
            given.setdefault("device_type", CUDA)
            return super().__new__(cls, **given)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class EventBase(_C.Event):
        def __new__(cls, enable_timing: bool = False, **given: bool) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        @property
        def cuda_event(self) -> int:
            return id(self)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        library.set_stream(stream_id, device_index)

    return {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_setStream": set_stream,
        "_cuda_getCurrentStream": lambda gpu: (library.get_stream(gpu), gpu, CUDA),
        "_cuda_getDefaultStream": lambda gpu: (0, gpu, CUDA),
        "_cuda_getCurrentRawStream": library.get_stream,
    }


CUDA = 1  # c10::DeviceType::CUDA


def _lazy_init() -> None:
    import torch

    torch.cuda._lazy_init()


def memory() -> dict[str, Any]:
    def stats(gpu: int) -> dict[str, Any]:
        known = library.memory(gpu)
        counts = {name: known[name] for name in ("current", "peak", "allocated", "freed")}
        sizes = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        return {size: {"all": counts} for size in sizes} | {"num_ooms": known["out_of_memory"]}

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": library.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": library.reset_accumulated,
        "_cuda_setMemoryFraction": library.set_memory_fraction,
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def free_and_total(gpu: int) -> tuple[int, int]:
    library.use_context(gpu, "cudaMemGetInfo")
    return TOTAL - library.memory(gpu)["current"], TOTAL


def graphs() -> dict[str, Any]:
    return {
        "_CUDAGraph": library.Graph,
        "_graph_pool_handle": lambda: (0, 1),
        "_cuda_isCurrentStreamCapturing": library.is_capturing,
        # torch.compile imports these; it has no Triton to go on with.
        "_cuda_CUDAAllocator_AllocatorState": object,
        "_set_cached_tensors_enabled": lambda enabled: None,
    }


def copies() -> dict[str, Any]:
    def on(gpu: int, tensor: Any) -> Any:
        return tensor if tensor.get_device() == gpu else tensor.to(gpu, non_blocking=True)

    def broadcast_coalesced(tensors: list, gpus: list[int], size: int) -> list[list]:
        return [[on(gpu, tensor) for tensor in tensors] for gpu in gpus]

    return {"_broadcast_coalesced": broadcast_coalesced}


# ---- reads of the host's memory that are no operators


def watch_reads_of_the_host(torch: Any) -> None:
    def watched(name: str) -> Callable:
        original = getattr(torch.Tensor, name)

        @wraps(original)
        def method(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
                storage = tensor.untyped_storage()
                library.host_reads(storage.data_ptr(), storage.nbytes(), f"Tensor.{name}")
            return original(tensor, *arguments, **options)

        return method

    for name in ("numpy", "tolist"):
        setattr(torch.Tensor, name, watched(name))
    write_record = torch._C.PyTorchFileWriter.write_record

    def saved(writer: Any, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage) and size:
            library.host_reads(data.data_ptr(), size, "torch.save")
        write_record(writer, name, data, size)

    torch._C.PyTorchFileWriter.write_record = saved


def resize_storages(torch: Any) -> None:
    """As fully_shard does it to let go of gathered weights; a CPU build has no code for it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return original(storage, size)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        library.resize_storage(whole, size)
        return storage

    torch.UntypedStorage.resize_ = resize_
