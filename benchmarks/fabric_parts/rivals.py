"""What the fabric is compared with: iperf3, libnbd with nbdkit, fsspec over HTTP with nginx, fio.

All are Debian's packages but fsspec. Each function starts the servers that it needs for one run, and
ends them. CPU seconds are of all processes of both ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import processes
from benchmarks.fabric_parts.ends import ROOT, Seen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.fabric_parts.network import Network

_PROBE = ROOT / "build/probe/nbd_probe"
_TICKS = os.sysconf("SC_CLK_TCK")


def missing(program: str) -> bool:
    """Whether a program is not installed; says so."""
    if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
        return False
    print(f"{program} is not installed (debian-packages.txt, [bench]): left out", file=sys.stderr)
    return True


# -- iperf3 ----------------------------------------------------------------------------------------


def iperf3(network: Network, streams: int, seconds: float) -> float:
    """Bytes a second that arrive, of all streams together; what one way of the network carries."""
    port = str(_free_port())
    server = [*network.server, "iperf3", "-s", "-1", "-p", port, "-B", network.address]
    client = [
        *network.client, "iperf3", "-c", network.address, "-p", port, "-t", f"{max(1, round(seconds))}",
        "-P", str(streams), "-l", "128K", "-J",
    ]  # fmt: skip
    with _running(server):
        for _ in range(50):  # it exits with 0 while there is no server
            ended = json.loads(_patient(client))["end"]
            if ended:
                return float(ended["sum_received"]["bits_per_second"]) / 8
            time.sleep(0.1)
    raise RuntimeError("iperf3 does not reach its server")


# -- libnbd and nbdkit -----------------------------------------------------------------------------


_NBD_TRIES = 3


def build_nbd_probe() -> bool:
    """Whether there is one."""
    source = Path(__file__).with_name("nbd_probe.c")
    if not _PROBE.exists() or _PROBE.stat().st_mtime < source.stat().st_mtime:
        _PROBE.parent.mkdir(parents=True, exist_ok=True)
        command = ("cc", "-O2", "-o", str(_PROBE), str(source), "-lnbd")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = f"nbd_probe cannot be built (libnbd-dev): left out\n{done.stderr}"
            print(why, file=sys.stderr)
            return False
    return True


def nbd(network: Network, file: Path, block: int, depth: int, seconds: float, threads: int) -> Seen:
    """Reads with libnbd, asynchronously, from nbdkit's file plugin; 0 `threads`: its own choice, 16."""
    for _ in range(_NBD_TRIES - 1):  # now and then nbdkit ends with its first client
        with contextlib.suppress(RuntimeError):
            return _nbd(network, file, block, depth, seconds, threads)
    return _nbd(network, file, block, depth, seconds, threads)


def _nbd(
    network: Network, file: Path, block: int, depth: int, seconds: float, threads: int
) -> Seen:
    port = str(_free_port())
    chosen = ("-t", str(threads)) if threads else ()
    server = [
        *network.server, "nbdkit", "-f", "-r", "-i", network.address, "-p", port, *chosen,
        "file", str(file),
    ]  # fmt: skip
    uri = f"nbd://{network.address}:{port}"
    with _running(server) as pid:
        _wait_for(network, port)
        client = [*network.client, str(_PROBE), uri, str(block), str(depth)]
        _patient([*client, "0.1"])
        before = _cpu_s(pid)
        found = json.loads(_patient([*client, f"{seconds:g}"]))
        return Seen(**found, server_cpu_s=_cpu_s(pid) - before)


# -- fsspec and nginx ------------------------------------------------------------------------------

_NGINX = """
daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen {address}:{port}; location / {{ root {root}; }} }}
}}
"""

_FSSPEC = """
import json, sys, time, numpy as np, fsspec
url, size, block, depth, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
fs = fsspec.filesystem("http", asynchronous=False)
random = np.random.default_rng(1)
count = bytes_ = 0
def batch():
    starts = random.integers(0, size // block, depth) * block
    return fs.cat_ranges([url] * depth, starts.tolist(), (starts + block).tolist())
batch()
began, cpu = time.perf_counter(), time.process_time()
while time.perf_counter() - began < seconds:
    got = batch()
    assert all(len(each) == block for each in got)
    count += depth
print(json.dumps({"bytes": count * block, "reads": count, "seconds": time.perf_counter() - began,
                  "client_cpu_s": time.process_time() - cpu}))
"""


def fsspec_http(
    network: Network, file: Path, block: int, depth: int, seconds: float, folder: Path
) -> Seen:
    """Reads with fsspec's `cat_ranges` in batches of `depth`, from nginx with sendfile."""
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    config = folder / "nginx.conf"
    config.write_text(
        _NGINX.format(folder=folder, address=network.address, port=port, root=file.parent)
    )
    with _running([*network.server, "nginx", "-c", str(config)]) as pid:
        _wait_for(network, str(port))
        url = f"http://{network.address}:{port}/{file.name}"
        numbers = (file.stat().st_size, block, depth, seconds)
        before = _cpu_s(pid)
        found = json.loads(
            _patient([*network.client, sys.executable, "-c", _FSSPEC, url, *map(str, numbers)])
        )
        return Seen(**found, server_cpu_s=_cpu_s(pid) - before)


# -- plain files -----------------------------------------------------------------------------------


def fio_file(file: Path, block: int, seconds: float, *, cold: bool, threads: int = 1) -> Seen:
    """Threads that read parts of a file in random order with pread; again and again, where it is cached."""
    part = file.stat().st_size // threads // block * block
    command = [
        "fio", "--name=file", f"--filename={file}", "--ioengine=psync", "--rw=randread",
        f"--bs={block}", f"--runtime={seconds:g}", "--thread", "--readonly", f"--invalidate={int(cold)}",
        f"--numjobs={threads}", f"--size={part}", f"--offset_increment={part}", "--group_reporting",
        "--output-format=json", *(() if cold else ("--time_based",)),
    ]  # fmt: skip
    text = _patient(command)
    job = json.loads(text[text.index("{") :])["jobs"][0]
    took_s = job["job_runtime"] / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * took_s  # both are of all threads
    took_s /= threads
    return Seen(job["read"]["io_bytes"], took_s, job["read"]["total_ios"], cpu_s)


# -- processes -------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    total = 0
    for each in processes.tree(pid):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{each}/stat").read_text()
            total += sum(map(int, text[text.rindex(")") + 2 :].split()[11:13]))
    return total / _TICKS


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[int]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            # A client's reset is told on its error output; what it says does not matter here.
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def _wait_for(network: Network, port: str) -> None:
    code = f"import socket; socket.create_connection(('{network.address}', {port}), 1).close()"
    _patient([*network.client, sys.executable, "-S", "-c", code])


def _patient(command: Sequence[str]) -> str:
    """What it prints; tries again while the server is not up."""
    done: Any = None
    for _ in range(50):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode == 0:
            return str(done.stdout)
        time.sleep(0.1)
    raise RuntimeError(f"{' '.join(command[:12])} ...: {done.stderr or done.stdout}")
