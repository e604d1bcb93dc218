"""Which host has the directory of a connection: a task elsewhere must not make a second queue of the same name."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qewqew_airflow.errors import WrongHost
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_core import BadArgument
from qewqew_core.tools import marker

HERE = socket.gethostname()


@pytest.fixture
def on(directory: Path, connect: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], QewQewHook]:
    """The hook of a connection that says that its directory is on this host."""
    monkeypatch.setenv("AIRFLOW__CORE__HOSTNAME_CALLABLE", "socket.gethostname")

    def make(hostname: Any) -> QewQewHook:
        connect("qewqew_default", "qewqew", str(directory), hostname=hostname)
        return QewQewHook()

    return make


@pytest.mark.parametrize("hostname", [HERE, "*", "", None])
def test_a_directory_that_is_here_or_everywhere_is_opened(on: Callable[[Any], QewQewHook], hostname: Any) -> None:
    hook = on(hostname)
    with hook.queue("orders") as queue:
        queue.put(b"1")
    assert hook.inspect("orders").records == 1
    assert hook.test_connection()[0]
    assert "hostname" not in {**hook.settings(), **hook.topic_settings()}


@pytest.mark.parametrize(
    "use",
    [
        *(QewQewHook.path, QewQewHook.inspect, QewQewHook.queue, QewQewHook.topic),
        lambda hook, name: hook.inspect_reader(name, "eu"),
    ],
)
def test_a_directory_on_another_host_is_not_touched(
    on: Callable[[Any], QewQewHook], directory: Path, use: Callable[[QewQewHook, str], Any]
) -> None:
    with pytest.raises(
        WrongHost, match=f"{directory}: connection 'qewqew_default' has this directory on host 'w1', but this runs on '{HERE}'; "
    ):
        use(on("w1"), "orders")
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_a_directory_on_another_host_is_reported_though_there_is_none_here(
    on: Callable[[Any], QewQewHook], directory: Path
) -> None:
    shutil.rmtree(directory)
    ok, message = on("w1").test_connection()
    assert not ok
    assert message.startswith(f"WrongHost: {directory}: connection 'qewqew_default' has this directory on host 'w1'")


@pytest.mark.parametrize("hostname", [7, ["w1"], "w1 w2", "w\n1"])
def test_what_is_no_name_of_a_host_is_refused(on: Callable[[Any], QewQewHook], hostname: Any) -> None:
    with pytest.raises(BadArgument, match="extra hostname must be the name of a host"):
        on(hostname).path("orders")


@pytest.mark.parametrize(
    ("executor", "hostname", "warned"),
    [
        ("CeleryExecutor", None, True),
        ("CeleryExecutor", "*", False),
        ("CeleryExecutor", HERE, False),
        ("LocalExecutor", None, False),
    ],
)
def test_with_several_workers_a_connection_that_names_no_host_is_warned_of(
    on: Callable[[Any], QewQewHook],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    executor: str,
    hostname: Any,
    warned: bool,
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    hook = on(hostname)
    hook.queue("orders").close()
    hook.inspect("orders")
    out, err = capfd.readouterr()
    message = f"does not say which host has {directory}; set hostname in its extra to its name (this is '{HERE}'), or to '*'"
    assert (out + err).count(message) == warned
