"""Checkpoints at addresses: what is fetched, when, and what comes of faults on the way."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forked
import pytest
from command import write
from small import fitted, is_same
from test_readme import files_of

import dpframe
from dpframe import checkpoint
from dpframe.checkpoint.address import cache_folder, local_file
from dpframe.errors import Failure, UserError

pytest.importorskip("aiohttp", reason="needs dpframe[remote]")


class Server:
    """What was asked for, and what the next answers have wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self.faults: list[str] = []

    @property
    def got(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET")]


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    class Handler(SimpleHTTPRequestHandler):
        def do_HEAD(self) -> None:
            here.asked.append(f"HEAD {self.path}")
            super().do_HEAD()

        def do_GET(self) -> None:
            here.asked.append(f"GET {self.path}")
            fault = here.faults.pop(0) if here.faults else ""
            content = bytearray((folder / self.path.lstrip("/")).read_bytes()) if fault else b""
            if not fault:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if fault == "a byte is another one":
                content[len(content) // 2] ^= 1
            self.wfile.write(content[: len(content) // 2] if fault == "it breaks off" else content)
            return None

        def log_message(self, *_: object) -> None: ...

    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        here = Server(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield here
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[tuple[Server, Path]]:
    """A server with a checkpoint, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "site" / "best.ckpt"
    file.parent.mkdir()
    checkpoint.save(fitted().state_dict(), file)
    os.utime(file, (1e9, 1e9))  # a server tells whole seconds, and tests save it again
    with served(file.parent) as server:
        yield server, file


def fetch(address: str, start: str) -> Path:
    """As another process, that has not asked yet, would."""
    return local_file(start, address)


def test_what_the_cache_has_is_fetched_again_only_if_it_is_another_one(site):
    server, file = site
    address = f"{server.url}/best.ckpt"
    first = fetch(address, "one")
    assert is_same(checkpoint.load(first)["task"], checkpoint.load(file)["task"])
    assert fetch(address, "one") == fetch(address, "two") == first
    assert server.got == ["best.ckpt"] and len(server.asked) == 3
    checkpoint.save(fitted(seed=1).state_dict(), file)
    assert is_same(checkpoint.load(fetch(address, "three"))["task"], checkpoint.load(file)["task"])
    assert server.got == ["best.ckpt"] * 2


def test_a_sha256_is_compared_and_what_has_it_is_not_asked_for_again(site):
    server, file = site
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=f"its sha256 is {right}; fix one of them$"):
        fetch(f"{server.url}/best.ckpt#sha256={'0' * 64}", "checkpoint")
    assert fetch(f"{server.url}/best.ckpt#sha256={right}", "checkpoint").is_file()
    assert server.got == ["best.ckpt"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a byte is another one", "/best.ckpt: it is damaged: its hash is different"),
        ("it breaks off", "/best.ckpt: ClientPayloadError: "),
    ],
)
def test_what_comes_damaged_is_no_checkpoint_and_the_next_time_it_is_whole(site, fault, said):
    server, file = site
    address = f"{server.url}/best.ckpt"
    kept = fetch(address, "before")
    checkpoint.save(fitted(seed=1).state_dict(), file)
    server.faults = [fault]
    with pytest.raises(Failure, match=said):
        fetch(address, "one")
    assert not list(cache_folder().glob("*/.best*"))
    checkpoint.load(kept)  # is whole
    assert is_same(checkpoint.load(fetch(address, "two"))["task"], checkpoint.load(file)["task"])


def test_what_is_not_there_and_a_server_that_is_away_are_one_line(site):
    server, _ = site
    with pytest.raises(UserError, match=r"^checkpoint=http.*/x.ckpt: there is no such file$"):
        fetch(f"{server.url}/x.ckpt", "checkpoint")
    with pytest.raises(Failure, match=r"^checkpoint=http.*: ClientConnectorError: "):
        fetch("http://127.0.0.1:1/x.ckpt", "checkpoint")
    with pytest.raises(UserError, match="^resume=ftpx://a/b.ckpt: Protocol not known: ftpx$"):
        fetch("ftpx://a/b.ckpt", "resume")


def test_an_address_of_a_folder_is_refused():
    with pytest.raises(UserError, match=r"names no file; .*, e.g. https://host/last.ckpt$"):
        local_file("checkpoint", "https://host/")


def test_of_processes_that_ask_together_one_fetches(site):
    server, _ = site
    cases = [f"{server.url}/best.ckpt"] * 3
    asking = [forked.server().Process(target=fetch, args=(case, "one")) for case in cases]
    for process in asking:
        process.start()
    for process in asking:
        process.join()
        assert process.exitcode == 0
    assert server.got == ["best.ckpt"]


RUN = ["recipe=boston", "logger=none", "callbacks.progress=null", "trainer.precision=64"]


def test_a_run_resumes_from_an_address_in_a_directory_of_its_own(tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert forked.run([*RUN, "trainer.max_epochs=1", "hydra.run.dir=run"], tmp_path).returncode == 0
    last = "run/checkpoints/last.ckpt"
    more = [*RUN, "trainer.max_epochs=2"]
    with served(tmp_path) as server:
        words = [*more, f"resume={server.url}/{last}", "hydra.run.dir=there"]
        there = forked.run([*words, "strategy=ddp", "trainer.gpus=2"], tmp_path, **cache)
        assert there.returncode == 0, there.stderr
        assert there.stderr.count("dpframe: fetching http") == 1
        words = [*RUN, "mode=test", f"checkpoint={server.url}/{last}"]
        tested = forked.run([*words, "hydra.run.dir=tested"], tmp_path, **cache)
        assert tested.returncode == 0, tested.stderr
        assert server.got == ["last.ckpt"]
    (tmp_path / "alone").mkdir()
    (tmp_path / last).rename(tmp_path / "alone/last.ckpt")
    words = [*more, "resume=alone/last.ckpt", "hydra.run.dir=here", "strategy=ddp"]
    assert forked.run([*words, "trainer.gpus=2"], tmp_path).returncode == 0
    mine, wanted = (
        checkpoint.load(tmp_path / run / "checkpoints/last.ckpt") for run in ("there", "here")
    )
    assert is_same(mine["task"], wanted["task"])


def test_a_task_is_loaded_from_an_address_and_a_sharded_one_with_its_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [*RUN, "trainer.max_epochs=1", "hydra.run.dir=run", "strategy=fsdp", "trainer.gpus=2"]
    assert forked.run(words, tmp_path).returncode == 0
    last = tmp_path / "run/checkpoints/last.ckpt"
    with served(tmp_path) as server:
        task = dpframe.load(f"{server.url}/run/checkpoints/last.ckpt", *RUN)
        assert {"parts.json", "last.ckpt"} < set(server.got)
    assert is_same(dict(task.state_dict()), checkpoint.load(last)["task"])


@pytest.fixture
def bucket(monkeypatch) -> Iterator[dict[str, str]]:
    """An S3 of this machine, by its variables; moto's server."""
    server_of = pytest.importorskip("moto.server", reason="needs moto[server]")
    pytest.importorskip("s3fs", reason="needs dpframe[remote]")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        yield variables
    finally:
        server.stop()


FAULTY = """
import fsspec
from mine.mirrored import Mirror, Mirrored

times = []


class Away(Mirror):
    def after_write(self, paths, removed):
        times.append(paths)
        store, _ = fsspec.url_to_fs(self.to)
        real = store.put_file

        def put_file(*given):
            if len(times) == 1:
                raise OSError("the store is away")
            real(*given)

        store.put_file = put_file
        super().after_write(paths, removed)
        store.put_file = real


class Faulty(Mirrored):
    writer_type = Away
"""


def test_a_mirror_has_each_whole_checkpoint_though_its_store_was_away(tmp_path, bucket):
    import boto3

    write(tmp_path, files_of("docs/reliability.md") | {"mine/faulty.py": FAULTY})
    store = boto3.client("s3")
    store.create_bucket(Bucket="bucket")
    words = ["--config-dir=mine", *RUN, "callbacks=mirrored", "hydra.run.dir=run"]
    words += ["callbacks.checkpoint._target_=mine.faulty.Faulty", "trainer.max_epochs=4"]
    words += ["callbacks.checkpoint.seconds_between=0", "callbacks.checkpoint.keep=4"]
    done = forked.run(words, tmp_path, **bucket)
    assert done.returncode == 0, done.stderr
    assert "is not in s3://bucket/boston yet: OSError: the store is away" in done.stdout
    for file in (tmp_path / "run/checkpoints").glob("*.ckpt"):
        found = store.get_object(Bucket="bucket", Key=f"boston/{file.name}")
        assert found["Body"].read() == file.read_bytes(), file
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    last = "s3://bucket/boston/last.ckpt"
    words = [*RUN, f"resume={last}", "trainer.max_epochs=5", "hydra.run.dir=on"]
    resumed = forked.run(words, tmp_path, **bucket, **cache)
    assert resumed.returncode == 0, resumed.stderr
    words = [*RUN, "trainer.max_epochs=5", "hydra.run.dir=whole"]
    assert forked.run(words, tmp_path).returncode == 0
    mine, wanted = (
        checkpoint.load(tmp_path / run / "checkpoints/last.ckpt")["task"] for run in ("on", "whole")
    )
    assert is_same(mine, wanted)
