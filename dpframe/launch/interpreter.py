"""Calls a function in a new interpreter, which has computed nothing and has no other thread.

There ranks can be forked in milliseconds, whatever the program around has done before, e.g. a
notebook; and nothing of that program is imported or run again. Run as a program, this file is that
interpreter.
"""

import codecs
import copyreg
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FunctionType, ModuleType
from typing import Any

BLOCK = 1 << 16  # bytes
NOTEBOOK = "pip install 'dpframe[notebook]'"


def call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: what it prints is printed here, what it raises is raised here.

    Ctrl-C is its own to end by, e.g. after a checkpoint; a second one ends it at once.
    """
    work = pack((function, args))
    with _Interpreter() as there:
        try:
            there.send((sys.path, file_of_main()), work)
            kind, value = there.wait()
        except KeyboardInterrupt:
            there.interrupt()
            kind, value = there.wait()
            if kind == "interrupted":
                raise KeyboardInterrupt(str(value)) from None
            raise
    if kind == "done":
        return value
    raise value


def pack(value: Any) -> bytes:
    """Pickled; with cloudpickle also what the program itself defines, e.g. a cell of a notebook."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def unpack(content: bytes, *, owns_main: bool = False) -> Any:
    """`owns_main`: in a process that runs no program itself, what this one defines gets into
    `__main__`, where torch.compile looks for it."""
    return load(io.BytesIO(content), owns_main=owns_main)


def dump(
    value: Any,
    file: Any,
    *,
    reducers: Mapping[Any, Callable[[Any], Any]] = {},
    buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None,
) -> None:
    """What `pack` does, into a file; `reducers` say how objects of these classes are pickled."""
    base: Any = pickle.Pickler
    main = None
    others: Any = copyreg.dispatch_table
    with suppress(ImportError):
        base = importlib.import_module("cloudpickle").Pickler
        others = base.dispatch_table
        # It gives functions that it pickles together one dict of globals: this one shows it.
        main = FunctionType(_nothing.__code__, vars(_main()))

    reduced: Callable[[Any], Any] | None = None
    if "torch" in sys.modules:
        from dpframe.launch import parametrized

        reduced = parametrized.reduced

    class Pickler(base):
        dispatch_table = ChainMap(dict(reducers), others)

        def reducer_override(self, each: Any) -> Any:
            found = NotImplemented if reduced is None else reduced(each)
            if found is NotImplemented and base is not pickle.Pickler:
                return super().reducer_override(each)
            return found

    try:
        Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback).dump((value, main))
    except (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        from dpframe.errors import UserError, first_line

        hint = f"; {NOTEBOOK}" if base is pickle.Pickler else ""
        said = f"{first_line(error)}{hint}"
        raise UserError(f"another process can't get all of this: {said}") from error


def load(file: Any, *, buffers: Iterable[Any] | None = None, owns_main: bool = False) -> Any:
    try:
        value, main = pickle.Unpickler(file, buffers=buffers).load()
    except AttributeError as error:
        from dpframe.errors import UserError

        raise UserError(
            f"{error}: what the program itself defines is unknown in another process; {NOTEBOOK}, "
            "or define it in a module"
        ) from None
    if owns_main and main is not None:
        theirs = main.__globals__.items()
        vars(_main()).update({name: each for name, each in theirs if not name.startswith("__")})
    return value


def file_of_main() -> str | None:
    """Where the program itself is, also as one of its ranks sees it: there `__main__` must have no
    `__file__`, since processes that it spawns would run that file."""
    return getattr(_main(), "__file__", None) or _theirs.get("__file__")


_theirs: dict[str, str | None] = {}  # of the program that has started this interpreter


def _nothing() -> None: ...


def _main() -> ModuleType:
    return sys.modules["__main__"]


class _Interpreter:
    """The process, as its parent sees it."""

    def __enter__(self) -> "_Interpreter":
        theirs, self._outbox = Pipe(duplex=False)
        self._inbox, answers = Pipe(duplex=False)
        numbers = theirs.fileno(), answers.fileno()
        # A terminal is theirs as well; what a notebook or a test has for one is written to here.
        inherited = [None if _is_terminal(s) else subprocess.PIPE for s in _streams()]
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-P", __file__, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=inherited[0],
            stderr=inherited[1],
            pass_fds=numbers,
        )
        theirs.close()
        answers.close()
        pipes = self._process.stdout, self._process.stderr
        self._printed = {
            pipe.fileno(): (at, codecs.getincrementaldecoder("utf-8")("replace"))
            for at, pipe in enumerate(pipes)
            if pipe is not None
        }
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr, self._inbox, self._outbox):
            if pipe is not None:
                pipe.close()

    def send(self, *parts: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended, and says why
            for part in parts:
                self._outbox.send_bytes(part if isinstance(part, bytes) else pickle.dumps(part))

    def interrupt(self) -> None:
        """A terminal has sent the signal to both, but then it counts once."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> tuple[str, Any]:
        """`done` and the value, `failed` and the error, or `interrupted` and how; once all is
        printed."""
        from dpframe.errors import Interrupted

        content = b""
        while not content and self._process.poll() is None:
            self._show(0.1)
            content = self._receive()
        self._process.wait()
        content = content or self._receive()
        while self._show(0.0):
            pass
        code = self._process.returncode
        if content:
            return unpack(content)
        if code > 128:
            return "interrupted", Interrupted(code - 128)
        return "failed", RuntimeError(f"the process ended with exit code {code}")

    def _receive(self) -> bytes:
        """What it has sent; nothing before its end."""
        with suppress(EOFError):
            return self._inbox.recv_bytes() if self._inbox.poll() else b""
        return b""

    def _show(self, seconds: float) -> bool:
        """Whether there was anything."""
        ready = wait([*self._printed, self._inbox.fileno()], seconds)
        printed = [number for number in self._printed if number in ready]
        for number in printed:
            at, decoder = self._printed[number]
            block = os.read(number, BLOCK)
            if not block:
                del self._printed[number]
            stream = _streams()[at]
            stream.write(decoder.decode(block))
            stream.flush()
        return bool(printed)


def _streams() -> tuple[Any, Any]:
    return sys.stdout, sys.stderr


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


# ---- in the new interpreter


def _answer(inbox: Connection, outbox: Connection) -> None:
    try:
        (sys.path[:], file), work = pickle.loads(inbox.recv_bytes()), inbox.recv_bytes()
    except EOFError:  # the program has ended
        return
    from dpframe.errors import Interrupted
    from dpframe.launch import interpreter, signals  # from where the program has it

    interpreter._theirs["__file__"] = file
    sys.modules["__main__"] = ModuleType("__main__")  # this file's names are none of the program's
    signals.end_with(inbox.fileno())  # nothing more is sent
    stop = signals.Interruption(is_quiet=True)
    stop.open()
    try:
        function, args = interpreter.unpack(work, owns_main=True)
        message: tuple[str, Any] = "done", function(*args)
    except Interrupted as error:
        message = "interrupted", error
    except BaseException as error:
        message = "failed", error
    signals.end_children()
    try:
        content = interpreter.pack(message)
        if message[0] == "failed":
            interpreter.unpack(content)  # an exception may not come out of its own pickle
    except Exception:
        text = "".join(traceback.format_exception(message[1])) if message[0] == "failed" else ""
        plain = RuntimeError(text or f"{message[1]!r} can't be sent")
        content = interpreter.pack(("failed", plain))
    outbox.send_bytes(content)


if __name__ == "__main__":
    _numbers = [int(number) for number in sys.argv[1:]]
    _answer(Connection(_numbers[0], writable=False), Connection(_numbers[1], readable=False))
