"""What a container allows is what its processes divide: planted trees of /proc and /sys."""

import os

import pytest

from dpframe.devices import cgroup, memory
from dpframe.devices.accelerator import cores

GIB = 2**30
POD = "kubepods/pod7/box"
TREES: dict[str, tuple[dict[str, str], int | None, float | None]] = {
    "a pod": (
        {
            "proc/self/cgroup": f"0::/{POD}\n",
            f"sys/fs/cgroup/{POD}/memory.max": f"{64 * GIB}\n",
            f"sys/fs/cgroup/{POD}/cpu.max": "400000 100000\n",
        },
        64 * GIB,
        4.0,
    ),
    "odd files": (
        {
            "proc/self/cgroup": "\n0\n0::/\udcff\n0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": "",
            "sys/fs/cgroup/pod/cpu.max": "400000\n",
        },
        None,
        None,
    ),
    "limits that nest": (
        {
            "proc/self/cgroup": f"0::/{POD}\n",
            f"sys/fs/cgroup/{POD}/memory.max": "max\n",
            f"sys/fs/cgroup/{POD}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod7/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod7/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{9 * GIB}\n",
            "sys/fs/cgroup/kubepods/cpu.max": "50000 20000\n",
        },
        8 * GIB,
        2.5,
    ),
    "a container with a namespace of its own": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
        GIB,
        0.5,
    ),
    "the first version, with the host's path": (
        {
            "proc/self/cgroup": f"5:cpu,cpuacct:/docker/7f\n4:memory:/docker/7f\n0::/{POD}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        2 * GIB,
        1.5,
    ),
    "the first version, without limits": (
        {
            "proc/self/cgroup": "1:cpu:/\n4:memory:/init\n0::/\n",
            "sys/fs/cgroup/memory/init/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        9223372036854771712,
        None,
    ),
    "no cgroups": ({}, None, None),
}


@pytest.mark.parametrize("name", TREES)
def test_memory_and_cores_are_those_that_the_container_allows(tmp_path, monkeypatch, name):
    files, limit, quota = TREES[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, errors="surrogateescape")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    assert cgroup.memory_limit() == limit
    assert cgroup.cpu_limit() == quota
    machines = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.machine() == min(machines, limit or machines)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(96)))
    assert cores() == max(1, int(quota or 96))


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_has_left_counts_what_only_caches_files(tmp_path, monkeypatch, version):
    of_machine = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
    mount = f"sys/fs/cgroup/{POD}" if version == 2 else f"sys/fs/cgroup/memory/{POD}"
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    box = {
        "proc/self/cgroup": f"0::/{POD}\n" if version == 2 else f"4:memory:/{POD}\n",
        f"{mount}/{names[0]}": f"{4 * GIB}\n",
        f"{mount}/{names[1]}": f"{3 * GIB}\n",
        f"{mount}/memory.stat": f"anon 7\n{names[2]} {GIB}\n",
    }
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    for files, left in ((of_machine, 8 * GIB), (box, 2 * GIB)):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        assert memory.free_of_machine() == left
