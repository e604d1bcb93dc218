"""A standalone cluster of Spark: a master and two workers, each a process on a host of its own.

The hosts are network namespaces at one switch where this user may make them, else they are all 127.0.0.1. The disk is one, as
if all mounted the same share; only `Host.hides` keeps a directory from them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyspark
from object_store import CREDENTIALS, object_store, s3_client

ROOT = Path(__file__).parents[3]
SPARK_HOME = str(Path(pyspark.__file__).parent)
PACKAGES = "qewqew_core", "qewqew_spark", "pyspark_qewqew"
DEPLOY = "org.apache.spark.deploy"
# Instead of those of the session's Spark, whose executors see the checkout.
NOT_INHERITED = {"PYTHONPATH", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "SPARK_REMOTE"}


def why_no_hosts() -> str:
    """Why this user cannot make network namespaces; empty if it is possible."""
    probe = "ip link add dev probe0 type bridge && ip link add dev probe1 type veth peer name probe2 && mount -t tmpfs tmpfs /mnt"
    if os.geteuid():
        return "not root"
    try:
        done = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", probe], capture_output=True, timeout=10, check=False)
    except FileNotFoundError:
        return "no unshare"
    return "namespaces are not allowed" if done.returncode else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


@dataclass
class Host:
    address: str
    hides: Path
    namespace: str | None = None
    switch: str = ""  # the namespace with the other end of its cable, which bears its name there

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` on this host, to which the directory `hides` is empty."""
        if self.namespace is None:
            return [*words]
        # `ip netns exec` makes a mount namespace of its own, which ends with the process.
        hide = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", hide, str(self.hides), *words]


@contextmanager
def hosts(count: int, hides: Path, apart: bool) -> Iterator[tuple[str, list[Host]]]:
    """The address of this machine as the hosts see it, and the hosts; ``apart``: in namespaces of their own."""
    if not apart:
        yield "127.0.0.1", [Host("127.0.0.1", hides) for _ in range(count)]
        return
    name, net = f"qew{os.getpid() % 10**7}", f"10.77.{os.getpid() % 256}"  # of this process, as others may test too
    switch = f"{name}s"
    with ExitStack() as undo:
        # The bridge is in a namespace of its own: what filters packets in this one, as Docker's engine does, would drop those
        # that a bridge hands on.
        ip("netns", "add", switch)
        undo.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "dev", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        ip("link", "add", "dev", name, "type", "veth", "peer", "name", name, "netns", switch)
        undo.callback(ip, "link", "del", name)
        ip("-n", switch, "link", "set", name, "master", "bridge", "up")
        ip("addr", "add", f"{net}.254/24", "dev", name)
        ip("link", "set", name, "up")
        made = []
        for number in range(1, count + 1):
            host = Host(f"{net}.{number}", hides, f"{name}x{number}", switch)
            there = host.namespace
            ip("netns", "add", there)
            undo.callback(ip, "netns", "del", there)
            ip("-n", switch, "link", "add", "dev", there, "type", "veth", "peer", "name", "eth0", "netns", there)
            undo.callback(ip, "-n", switch, "link", "del", there)  # a namespace lives on while its sockets wait for answers
            ip("-n", switch, "link", "set", there, "master", "bridge", "up")
            ip("-n", there, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in "lo", "eth0":
                ip("-n", there, "link", "set", link, "up")
            made.append(host)
        yield f"{net}.254", made


def bare_python(directory: Path) -> str:
    """A Python that has all packages of this one but QewQew, so that executors have it only if it is shipped to them."""
    venv.create(directory, symlinks=True)
    [site] = directory.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(str(Path(SPARK_HOME).parent))  # whose own .pth files, as that of QewQew, do not count
    python = str(directory / "bin" / "python")
    look = [python, "-c", "import pyarrow, qewqew_core"]
    seen = subprocess.run(look, capture_output=True, text=True, check=False, cwd=directory, env=environment(python))
    assert "No module named 'qewqew_core'" in seen.stderr
    return python


def zipped(file: Path) -> str:
    """What ``--py-files`` ships: the packages at the top of a zip."""
    with zipfile.ZipFile(file, "w") as archive:
        for package in PACKAGES:
            for source in (ROOT / package).rglob("*.py"):
                archive.write(source, source.relative_to(ROOT))
    return str(file)


def environment(python: str, address: str = "127.0.0.1", **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED and not name.startswith("AWS_")}
    spark = {"SPARK_HOME": SPARK_HOME, "SPARK_LOCAL_IP": address, "PYSPARK_PYTHON": python}
    return {**kept, **spark, **more}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(what: Callable[[], object], log: Path, process: subprocess.Popen[bytes], timeout: float = 300) -> None:
    """Wait until ``what()`` is true; fails with the end of the log if the process ends before."""
    end = time.monotonic() + timeout
    while not what():
        assert process.poll() is None, f"it ended with {process.returncode}: {log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"nothing happened in {timeout} s: {log.read_text()[-3000:]}"
        time.sleep(0.1)


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is killed with what it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Cluster:
    directory: Path
    python: str
    address: str  # of this machine, where drivers run
    master: str
    workers: list[tuple[Host, subprocess.Popen[bytes]]]
    store: str  # URL of the object store
    shipped: str  # the zip of QewQew

    def submit(self, *words: str, conf: Mapping[str, str]) -> list[str]:
        """The command of spark-submit; what it runs gets QewQew from ``--py-files`` only."""
        settings = {
            "spark.driver.host": self.address,
            "spark.ui.enabled": "false",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both workers are there before the first task
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            **conf,
        }
        given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        return [f"{SPARK_HOME}/bin/spark-submit", "--master", self.master, "--py-files", self.shipped, *given, *words]

    def environment(self) -> dict[str, str]:
        return environment(self.python, self.address, **CREDENTIALS)

    def cut_off(self, number: int) -> None:
        """The worker and its executors hear and say nothing any more, but go on where they are hosts of their own."""
        host, process = self.workers[number]
        if host.namespace is None:
            os.killpg(process.pid, signal.SIGSTOP)
        else:
            ip("-n", host.switch, "link", "set", host.namespace, "down")


@contextmanager
def standalone(directory: Path, hides: Path, apart: bool) -> Iterator[Cluster]:
    """``hides``: a directory that the hosts of the cluster do not see, if they are ``apart``; they see an object store."""
    with ExitStack() as stack:
        address, (first, *others) = stack.enter_context(hosts(3, hides, apart))
        store = stack.enter_context(object_store(address))
        s3_client(store).create_bucket(Bucket="batches")
        python = bare_python(directory / "bare")

        def daemon(host: Host, kind: str, *words: str) -> tuple[Path, subprocess.Popen[bytes]]:
            log = directory / f"{kind}-{host.namespace or len(os.listdir(directory))}.log"
            command = host.command(
                f"{SPARK_HOME}/bin/spark-class", f"{DEPLOY}.{kind.lower()}.{kind}", "--host", host.address, *words
            )
            return log, stack.enter_context(
                running(command, environment(python, host.address, SPARK_DAEMON_MEMORY="256m", **CREDENTIALS), log)
            )

        port = free_port()
        log, process = daemon(first, "Master", "--port", str(port), "--webui-port", "0")
        master = f"spark://{first.address}:{port}"
        wait_for(lambda: "New state: ALIVE" in log.read_text(), log, process)
        workers = []
        for number, host in enumerate(others):
            work = str(directory / f"work{number}")
            workers.append(
                daemon(host, "Worker", "--cores", "1", "--memory", "1g", "--work-dir", work, "--webui-port", "0", master)
            )
        for log, process in workers:
            wait_for(lambda log=log: "Successfully registered with master" in log.read_text(), log, process)
        processes = list(zip(others, (process for _, process in workers), strict=True))
        yield Cluster(directory, python, address, master, processes, store, zipped(directory / "qewqew.zip"))
