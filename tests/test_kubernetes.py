"""The manifests of examples/clusters: against schemas, and their command in the image's layout."""

import copy
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import CLEAN, ROOT, Environment, environment

EXAMPLES = ROOT / "examples" / "clusters"
VERSION = "1.31"  # of Kubernetes
WHERE = "import dpframe; print(dpframe.__file__)"
ANY: dict[str, Any] = {"type": "object"}  # what Kubernetes' own schema checks
COUNT = {"type": "integer", "minimum": 0}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others, as `kubectl apply` takes it."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    name = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
    meta = closed("name", name=name)
    const = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return closed("apiVersion kind metadata spec", **const, metadata=meta, spec=spec)


REPLICAS = closed(
    "template",
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=ANY,
)
POLICY = closed(
    "",
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    cleanPodPolicy={"enum": ["All", "Running", "None"]},
    suspend={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
)
PYTORCH_JOB = resource(
    "kubeflow.org/v1",
    "PyTorchJob",
    closed(
        "pytorchReplicaSpecs",
        nprocPerNode={"type": "string"},
        runPolicy=POLICY,
        pytorchReplicaSpecs=closed("", Master=REPLICAS, Worker=REPLICAS),
    ),
)
JOB = closed(
    "name template",
    name={"type": "string"},
    replicas=COUNT,
    template=closed("", metadata=ANY, spec=ANY),
)
FAILURES = closed("", maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]})
JOB_SET = resource(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    closed("", replicatedJobs={"type": "array", "items": JOB}, failurePolicy=FAILURES, suspend={}),
)


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())


def pods(given: dict[str, Any]) -> list[dict[str, Any]]:
    spec = given["spec"]
    if given["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    return [replicas["template"] for replicas in spec["pytorchReplicaSpecs"].values()]


def check(given: dict[str, Any]) -> None:
    """Raises what is wrong with it."""
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes = pytest.importorskip("kubernetes_validate")
    is_set = given["kind"] == "JobSet"
    jsonschema.validate(given, JOB_SET if is_set else PYTORCH_JOB)
    if is_set:
        jobs = [job["template"]["spec"] for job in given["spec"]["replicatedJobs"]]
    else:
        jobs = [{"template": pod} for pod in pods(given)]
    for job in jobs:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
        kubernetes.validate(whole, VERSION, strict=True)


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
def test_a_manifest_is_what_its_schema_allows(name):
    check(manifest(name))


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "jobset.yaml"])
@pytest.mark.parametrize("place", ["job", "pod", "container"])
def test_a_misspelt_field_of_a_manifest_is_seen(name, place):
    given = copy.deepcopy(manifest(name))
    (pod, *_) = pods(given)
    where = {"job": given["spec"], "pod": pod["spec"], "container": pod["spec"]["containers"][0]}
    where[place]["imagePulPolicy"] = "Always"
    check(manifest(name))  # or this skips
    with pytest.raises(Exception, match="imagePulPolicy"):
        check(given)


def test_both_manifests_run_the_same_on_as_many_ranks():
    by_kind = [pods(manifest(name))[0] for name in ("pytorchjob.yaml", "jobset.yaml")]
    (user,) = re.findall(r"useradd .* --uid (\d+)", (EXAMPLES / "Dockerfile").read_text())
    for pod in by_kind:  # else a new volume is root's alone
        assert pod["spec"]["securityContext"]["fsGroup"] == int(user)
    first, second = (pod["spec"]["containers"][0] for pod in by_kind)
    for field in ("args", "image", "resources", "volumeMounts"):
        assert first[field] == second[field]
    told = {each["name"]: each.get("value") for each in second["env"]}
    assert told["PET_NPROC_PER_NODE"] == manifest("pytorchjob.yaml")["spec"]["nprocPerNode"]
    assert int(told["PET_NPROC_PER_NODE"]) == second["resources"]["limits"]["nvidia.com/gpu"]
    job_set = manifest("jobset.yaml")
    name, (job,) = job_set["metadata"]["name"], job_set["spec"]["replicatedJobs"]
    assert told["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    assert int(told["PET_NNODES"]) == job["template"]["spec"]["parallelism"]


def built(folder: Path) -> Environment:
    """A virtual environment with what the Dockerfile copies and installs, and no more."""
    image, here = Environment(folder / "venv"), ROOT
    work = folder / "image"
    for line in (EXAMPLES / "Dockerfile").read_text().splitlines():
        match shlex.split(line, comments=True):
            case ["WORKDIR", "/opt/dpframe"]:
                work.mkdir()
            case ["COPY", *sources, "/usr/local/bin/"]:
                for source in sources:
                    shutil.copy(here / source, image.python.parent)
            case ["COPY", *sources, target]:
                for source in sources:
                    copy_of = shutil.copytree if (here / source).is_dir() else shutil.copy
                    copy_of(here / source, work / target)
            case ["RUN", "pip", "install", *_, "."]:
                image.install(work)
    torchrun = image.python.with_name("torchrun")  # torch is the outer environment's
    torchrun.write_text(
        f"#!{image.python}\nfrom torch.distributed.run import main\nmain()\n", encoding="utf-8"
    )
    torchrun.chmod(0o755)
    return image


def test_the_image_has_a_compiler_for_trainer_compile():
    steps = (EXAMPLES / "Dockerfile").read_text().splitlines()
    (installs,) = [number for number, step in enumerate(steps) if step.startswith("RUN apt-get")]
    assert "g++" in shlex.split(steps[installs])  # with gcc and the headers of C
    assert installs < steps.index("USER trainer")


def test_the_command_of_a_manifest_trains_in_the_layout_of_the_image(tmp_path):
    """Two pods on this machine, as the operator starts them, of one rank each."""
    image, home = built(tmp_path), tmp_path / "home"
    home.mkdir()
    (container,) = pods(manifest("pytorchjob.yaml"))[0]["spec"]["containers"]
    assert re.search(r'^ENTRYPOINT \["train"\]$', (EXAMPLES / "Dockerfile").read_text(), re.M)
    path = f"{image.python.parent}:{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if k not in (*CLEAN, "PYTHONPATH")}
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    given |= {"PET_MASTER_PORT": str(free_port()), "PATH": path, "RUN": str(tmp_path / "run")}
    command = [image.python.with_name("train"), *container["args"], "trainer.max_epochs=2"]
    jobs = [
        subprocess.Popen(
            command,
            cwd=home,
            env=inherited | given | {"PET_NODE_RANK": node, "RANK": node, "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in "01"
    ]
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "".join(said)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["replicas"], summary["steps"]) == ("finished", 2, 8)
    assert str(image.packages) in image("-c", WHERE, cwd=home)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_pod_that_starts_again_goes_on_from_the_last_checkpoint(tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    run = tmp_path / "run"

    def started(**variables: str) -> str:
        env = environment(**({"PATH": path, "RUN": str(run)} | variables))
        command = [EXAMPLES / "train", "recipe=boston"]
        return subprocess.check_output(command, env=env, text=True).strip()

    assert started(RUN="") == "-m dpframe strategy=ddp recipe=boston"
    assert started() == f"-m dpframe strategy=ddp hydra.run.dir={run} recipe=boston"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    assert started() == f"-m dpframe strategy=ddp resume={run} recipe=boston"
