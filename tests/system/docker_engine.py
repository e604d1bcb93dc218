"""A Docker engine for a test, and images in the place of those that no registry gives.

Where an engine with compose answers, it is used. Else one is started, which needs root and Debian's packages docker.io,
iptables and mmdebstrap; compose and buildx come from the next Debian, as Debian 12 has none. Nothing of it is left at the end.

Stand-ins are made of Debian's packages and bear the names of the real images, so that Dockerfile and compose.yaml stay as they
are. They have the paths, users and settings of the real images on which these rely, and neither their entry points nor all that
is in them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from killing import until

ROOT = Path(__file__).parents[2]
PLUGINS = Path("usr/libexec/docker/cli-plugins")
FORWARDS = Path("/proc/sys/net/ipv4/ip_forward")  # the engine turns it on
STAND_IN = "qewqew-stand-in"
# What pip and apt need on a machine whose way out ends at a proxy of its own.
OF_THIS_MACHINE = [path for path in ("/etc/pip.conf", "/usr/local/share/ca-certificates") if os.path.exists(path)]
# Of the three images together.
PACKAGES = "ca-certificates,curl,dumb-init,postgresql,procps,python3-venv,redis-server"

AIRFLOW_ENTRY = """
umask 0002
[ "$1" != bash ] || exec "$@"
exec airflow "$@"
"""
POSTGRES_ENTRY = """
set -e
bin=$(echo /usr/lib/postgresql/*/bin)
if [ ! -e "$PGDATA/PG_VERSION" ]; then
    "$bin/initdb" -U "$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") -E UTF8
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_USER" | "$bin/postgres" --single -j -D "$PGDATA" postgres
fi
exec "$bin/$@" -c listen_addresses='*'
"""


def entry(script: str, *before: str) -> str:
    return f"ENTRYPOINT {json.dumps([*before, '/bin/bash', '-c', script, 'entry'])}"


STAND_INS = {
    "apache/airflow": f"""
FROM {STAND_IN}
RUN useradd --uid 50000 --gid 0 --create-home airflow \
    && install --directory --owner airflow --group 0 --mode 0775 /opt/airflow /opt/airflow/dags /opt/airflow/logs
USER airflow
WORKDIR /opt/airflow
ENV PATH=/home/airflow/.local/bin:$PATH AIRFLOW_HOME=/opt/airflow DUMB_INIT_SETSID=1
COPY constraints.txt /tmp/
RUN python3 -m venv /home/airflow/.local \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt --upgrade pip \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt apache-airflow
{entry(AIRFLOW_ENTRY, "/usr/bin/dumb-init", "--")}
""",
    "postgres": f"""
FROM {STAND_IN}
ENV PGDATA=/var/lib/postgresql/data
RUN install --directory --owner postgres --mode 0700 $PGDATA && install --directory --mode 3777 /var/run/postgresql
{entry(POSTGRES_ENTRY)}
STOPSIGNAL SIGINT
CMD ["postgres"]
""",
    "redis": f"""
FROM {STAND_IN}
RUN install --directory --owner redis /data
WORKDIR /data
CMD ["redis-server"]
""",
}


@dataclass(frozen=True)
class Docker:
    """The command ``docker``, at one engine."""

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __call__(self, *words: str, text: str | None = None, timeout: float = 300) -> str:
        """Its standard output; raises `CalledProcessError`, with both outputs in a note, if it fails."""
        done = subprocess.run(
            ["docker", *words], env=self.env, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            error = subprocess.CalledProcessError(done.returncode, done.args)
            error.add_note(done.stdout[-3000:] + done.stderr[-5000:])
            raise error
        return done.stdout

    def answers(self, *words: str) -> bool:
        try:
            self(*words)
        except (OSError, subprocess.SubprocessError):
            return False
        return True


def why_no_engine() -> str:
    """Why there is no engine, and none can be started; empty if there is."""
    if Docker().answers("compose", "ls"):
        return ""
    if os.geteuid():
        return "no Docker engine with compose answers, and only root can start one"
    missing = [name for name in ("docker", "dockerd", "iptables-save", "mmdebstrap") if not shutil.which(name)]
    return f"no Docker engine with compose answers, and to start one there is no {', '.join(missing)}" if missing else ""


@contextmanager
def docker_engine() -> Iterator[Docker]:
    if Docker().answers("compose", "ls"):
        yield Docker()
        return
    home = Path(tempfile.mkdtemp(prefix="qewqew-docker-", dir="/tmp"))  # the path of a socket must be short
    docker = Docker({**os.environ, "DOCKER_HOST": f"unix://{home}/socket", "DOCKER_CONFIG": f"{home}/config"})
    tables = {table: run("iptables-save", "-t", table) for table in ("filter", "nat")}
    links, forwards = set(os.listdir("/sys/class/net")), FORWARDS.read_text()
    try:
        plugins_of_debian(home / "config" / "cli-plugins")
        with (home / "log").open("wb") as log:
            command = ["dockerd", f"--host=unix://{home}/socket", f"--data-root={home}/data", f"--exec-root={home}/exec"]
            command += [f"--pidfile={home}/pid", "--oom-score-adjust=0", f"--mtu={smallest_mtu()}"]
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            until(lambda: docker.answers("compose", "ls"), f"the engine, whose log is {home}/log", 60, 0.5)
            yield docker
        finally:
            daemon.terminate()
            daemon.wait(60)
    finally:
        for saved in tables.values():
            run("iptables-restore", text=saved)
        FORWARDS.write_text(forwards)
        for link in set(os.listdir("/sys/class/net")) - links:
            if link.startswith(("docker0", "br-")):
                run("ip", "link", "del", link)
        shutil.rmtree(home)


def plugins_of_debian(target: Path) -> None:
    """Compose and buildx, for any client of the same kind of processor."""
    with tempfile.TemporaryDirectory(prefix="qewqew-") as tree:
        run("mmdebstrap", "--variant=extract", "--include=docker-compose,docker-buildx", "trixie", tree)
        shutil.copytree(Path(tree) / PLUGINS, target)


@contextmanager
def docker_compose() -> Iterator[list[str]]:
    """The words of the command, which reads a file without an engine; none: it cannot be had."""
    if shutil.which("docker") and Docker().answers("compose", "version"):
        yield ["docker", "compose"]
    elif os.geteuid() or not shutil.which("mmdebstrap"):
        yield []
    else:
        with tempfile.TemporaryDirectory(prefix="qewqew-") as directory:
            plugins_of_debian(Path(directory, "plugins"))
            yield [f"{directory}/plugins/docker-compose"]


def smallest_mtu() -> int:
    """Of all links: none on the way out takes less."""
    return min(int(path.read_text()) for path in Path("/sys/class/net").glob("*/mtu"))


def run(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=900, check=True).stdout


def provide(docker: Docker, images: set[str]) -> list[str]:
    """Has each of these images on the engine; returns those in whose place there is a stand-in."""
    made = [image for image in sorted(images) if not docker.answers("image", "inspect", image) and not pulled(docker, image)]
    if made:
        make_base(docker)
    for image in made:
        text = STAND_INS[image.partition(":")[0]]
        docker("build", "--tag", image, "--file", "-", str(ROOT), text=text, timeout=900)
    return made


def pulled(docker: Docker, image: str) -> bool:
    try:
        docker("pull", "--quiet", image, timeout=900)
    except subprocess.SubprocessError:
        return False
    return True


def make_base(docker: Docker) -> None:
    with tempfile.TemporaryDirectory(prefix="qewqew-") as directory:
        tree = f"{directory}/base.tar"
        hooks = [f"--customize-hook=copy-in {path} {os.path.dirname(path)}" for path in OF_THIS_MACHINE]
        hooks.append('--customize-hook=chroot "$1" update-ca-certificates')
        unsafe = "--dpkgopt=force-unsafe-io"  # what a power cut leaves of it, nobody wants
        run("mmdebstrap", "--variant=minbase", unsafe, f"--include={PACKAGES}", *hooks, "bookworm", tree)
        docker("import", tree, STAND_IN, timeout=300)
