"""Calls a function in a process that has torch imported and has computed nothing.

Ranks that it launches are forks: a server imports torch once for all of them.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from dpframe.strategies.launch import allow_fork

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["dpframe.trainer.loop", "dpframe.strategies.ddp"])


def fresh(call: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, SERVER) as pool:
        return pool.submit(_call, call, args).result()


def _call(call: Callable[..., Any], args: tuple) -> Any:
    allow_fork()
    return call(*args)
