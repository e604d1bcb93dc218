"""Unpacks archives of ours with every release of Python that we work with."""

import tarfile
from pathlib import Path


def unpack(file: Path, place: Path) -> Path:
    """``extractall(filter="data")``, of which Python before 3.11.4 knows nothing; Debian 12 has 3.11.2."""
    with tarfile.open(file) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(place)  # noqa: S202 # it is ours
    return place
