"""What an opening does with the files of stages that use the queue, or have died. See `Stage`."""

from __future__ import annotations

import contextlib
import os
import re

from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import close_all
from qewqew_core.disk.files import Files
from qewqew_core.queue import group_commit, paths

_OURS = re.compile(r"[0-9a-f]{16}([.]([0-9]+|mine|[0-9a-f]{16}[.][a-z]+))?")  # a claim, or a chunk or request of its stage


def settle(files: Files, path: str, served: set[bytes]) -> None:
    """Tell living stages what has happened to their requests; the log names those that were ``served``. Remove the files of
    those whose process has died, and their common directory if it is empty.
    """
    ids = {each.hex() for each in served}
    home = path + paths.STAGED
    try:
        found = files.list(home)
    except FileNotFoundError:  # a stage that has just ended removes it too
        return
    by_claim: dict[str, list[str]] = {}
    for name in filter(_OURS.fullmatch, found):
        by_claim.setdefault(name.partition(".")[0], []).append(name)
    for claim, names in by_claim.items():
        descriptors: list[int] = []
        try:
            try:
                files.open_into(descriptors, os.path.join(home, claim))
            except FileNotFoundError:
                pass
            except OSError:  # not a claim, or another user's
                continue
            # Held until the claim is removed: a stage that is just making it finds it taken, or gone.
            if not descriptors or lock.whole(descriptors[0]):
                for name in sorted(names, reverse=True):  # the claim is the last
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # such a directory is not ours
                        files.unlink(os.path.join(home, name))
            else:
                for name in names:
                    if name.endswith(group_commit.TAKEN):
                        group_commit.settle(files, os.path.join(home, name), ids)
        finally:
            close_all(descriptors)
    remove_home(files, path)


def remove_home(files: Files, path: str) -> None:
    """Remove the directory, unless a stage has files there; one that is about to make some makes it again."""
    with contextlib.suppress(OSError):  # it is not empty, or gone
        files.remove_directory(path + paths.STAGED)
