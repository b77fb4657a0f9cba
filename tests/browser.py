"""TensorBoard, and headless Chromium by its DevTools protocol: what a user of a page sees."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tornado.websocket import websocket_connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SECONDS = 60  # in which a page has to show what is waited for
# Web components keep what they show in shadow roots, which `document.querySelectorAll` leaves out.
LIBRARY = """
function all(selector, root = document) {
  const found = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll("*"))
    if (element.shadowRoot) found.push(...all(selector, element.shadowRoot));
  return found;
}
function shown(selector) {
  return all(selector).filter(element => element.checkVisibility({visibilityProperty: true}));
}
function has(values, value) { return values.includes(value) && values; }
function texts(selector) {
  return shown(selector).map(element => element.textContent.trim().replace(/\\s+/g, " "));
}
"""


class Page:
    def __init__(self, port: int) -> None:
        with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            (page,) = [target for target in json.load(answer) if target["type"] == "page"]
        self._loop = asyncio.new_event_loop()
        self._socket = self._loop.run_until_complete(_connected(page["webSocketDebuggerUrl"]))
        self._sent = 0
        size = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        self._ask("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        answer = self._ask(
            "Runtime.evaluate",
            expression=f"(() => {{ {LIBRARY}; return {script}; }})()",
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The first value of the script that is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"{script} is still {value!r}"
            time.sleep(0.05)
        return value

    def close(self) -> None:
        self._socket.close()
        self._loop.close()

    def _ask(self, method: str, **params: Any) -> Any:
        return self._loop.run_until_complete(self._answer(method, params))

    async def _answer(self, method: str, params: dict[str, Any]) -> Any:
        self._sent += 1
        await self._socket.write_message(
            json.dumps({"id": self._sent, "method": method, "params": params})
        )
        while message := await asyncio.wait_for(self._socket.read_message(), SECONDS):
            answer = json.loads(message)
            if answer.get("id") == self._sent:  # all else are events
                assert "error" not in answer, (method, answer)
                return answer["result"]
        raise AssertionError(f"Chromium has closed the connection at {method}")


async def _connected(address: str) -> Any:
    return await websocket_connect(address, max_message_size=2**27)  # all of an answer is one


@contextmanager
def chromium(directory: Path) -> Iterator[Page]:
    assert CHROMIUM is not None, "there is no chromium"
    profile = directory / "chromium"
    process = started(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",  # which root can't have
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
    )
    with ended(process):
        port = int(_when_there(profile / "DevToolsActivePort", process).split()[0])
        page = Page(port)
        try:
            yield page
        finally:
            page.close()


@contextmanager
def tensorboard(logdir: str, directory: Path) -> Iterator[Callable[..., str]]:
    """In `directory`. What it yields returns its address once it has data for these tabs: a page
    that is open does not look for more by itself."""
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", 0]
    words += ["--reload_interval", 1, "--load_fast", "false"]
    log = directory / "tensorboard.log"

    def when_it_shows(*tabs: str) -> str:
        end = time.monotonic() + SECONDS
        while not (address := re.search(r"http://\S+", log.read_text())) or not _has(address, tabs):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        return address[0]

    with log.open("w") as file, ended(started(words, cwd=directory, stderr=file)):
        yield when_it_shows


def _has(address: re.Match, tabs: tuple[str, ...]) -> bool:
    with urlopen(f"{address[0]}data/plugins_listing") as answer:
        listed = json.load(answer)
    return all(listed[tab]["enabled"] for tab in tabs)


def started(words: list[Any], **given: Any) -> subprocess.Popen:
    """A process group of its own."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*map(str, words)], start_new_session=True, **{**silent, **given})


@contextmanager
def ended(process: subprocess.Popen) -> Iterator[None]:
    """Leaves nothing of it, and of what it has started, behind."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _when_there(path: Path, process: subprocess.Popen) -> str:
    end = time.monotonic() + SECONDS
    while not (path.is_file() and (text := path.read_text()).count("\n")):
        assert process.poll() is None and time.monotonic() < end, f"no {path}"
        time.sleep(0.02)
    return text
