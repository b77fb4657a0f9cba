"""What a data worker answers: a batch or an error, whole."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from dpframe.errors import Failure, UserError, exited

SHORT_BYTES = 2048  # of a message; a pipe takes 4096 at once, and torch adds some hundred


class Answers(Dataset):
    """The data set in a data worker: it answers each request with a batch or an error."""

    def __init__(
        self,
        answer: Callable[..., Any],
        dataset: Any,
        is_reading: Tensor,
        worker_init_fn: Callable[[int], Any] | None,
    ) -> None:
        self._answer = answer
        self._dataset = dataset
        self._is_reading = is_reading
        self._worker_init_fn = worker_init_fn

    def __getitem__(self, request: tuple) -> Any:
        """In a worker. An error that is one line is an answer: torch makes a traceback of it."""
        info = get_worker_info()
        assert info is not None
        self._is_reading[info.id] = True
        try:
            self._set_up(info)
            return _Packed(self._answer(*request))
        except UserError as error:
            return _Packed(_plain(error))
        except SystemExit as error:
            return _Packed(exited(error, who=f"data worker {info.id}: "))
        except Exception as error:
            if _arrives(type(error)):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._is_reading[info.id] = False

    def _set_up(self, info: Any) -> None:
        """With the first request, so that its faults are told as those of rows."""
        object.__setattr__(info, "dataset", self._dataset)  # not these answers; torch freezes it
        if self._worker_init_fn is not None:
            self._worker_init_fn(info.id)
            self._worker_init_fn = None


def _plain(error: UserError) -> UserError:
    """The same line: a class of the user's may take more than its text, or have no name."""
    plain = Failure(str(error)) if isinstance(error, Failure) else UserError(str(error))
    plain.exit_code = error.exit_code
    return plain


def _arrives(kind: type[Exception]) -> bool:
    """Torch loses an error whose class no pickle can name; a StopIteration is the end to it."""
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return not issubclass(kind, StopIteration)


class _Packed:
    """An answer, pickled where an error of it can be told. It arrives whole or not at all: a long
    one is in shared memory, as a pipe takes it in parts, and who reads them waits for ever for
    those that a killed worker did not write. Unpickled, it is the answer itself."""

    def __init__(self, answer: Any) -> None:
        try:
            data = ForkingPickler.dumps(answer)
        except Exception as error:
            raise UserError(
                f"a data worker can't send what it read: {type(error).__name__}: {error}; "
                "return rows that can be pickled, or set data.workers=0"
            ) from error
        self._data: bytes | Tensor = bytes(data)
        if len(data) > SHORT_BYTES:
            self._data = torch.frombuffer(data, dtype=torch.uint8).share_memory_()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return _unpacked, (self._data,)


def _unpacked(data: bytes | Tensor) -> Any:
    return pickle.loads(data.numpy().data if isinstance(data, Tensor) else data)
