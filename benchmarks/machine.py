"""Where it was measured, and with which versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import subprocess
from pathlib import Path

from benchmarks.peers import PEERS


def describe(directory: str) -> dict[str, str]:
    models = [line.partition(": ")[2] for line in read("/proc/cpuinfo") if line.startswith("model name")]
    memory = next(int(line.split()[1]) for line in read("/proc/meminfo") if line.startswith("MemTotal"))
    found = {
        "processor": f"{os.cpu_count()} × {(models or [platform.machine()])[0]}",
        "memory": f"{memory / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "file system": file_system(directory),
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
    }
    for package in sorted({one.package_name or one.package or "" for one in PEERS.values()} - {""}):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if server := shutil.which("redis-server"):
        told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
        found["redis-server"] = next((word[2:] for word in told.split() if word.startswith("v=")), "?")
    return found


def read(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def file_system(directory: str) -> str:
    """Of the mount that the directory is on; in memory, nothing waits for a disk, and that must be seen."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in read("/proc/self/mountinfo") if line.split()[2] == number]
    return kinds[-1] if kinds else "unknown"
