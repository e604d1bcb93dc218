"""Where the files of a batch are: a directory of this machine, or a URL of any store that fsspec knows.

A store can be pickled and sent to the process that reads. It has a place and options, but no connection.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any
from urllib.parse import unquote, urlsplit

from qewqew_core import arguments, references, secrecy
from qewqew_core.batch.answers import is_final, status_of
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import DISK, Files, check_regular, files_of, read_whole
from qewqew_core.disk.opening import opening, refusing
from qewqew_core.disk.reserve import FULL
from qewqew_core.errors import BadArgument, BadPath, Broken, DiskFull, StoreError
from qewqew_core.secrecy import excerpt

Read = Callable[[int, int], bytes]  # (start, end): the bytes between, fewer only where the file ends

_TEMPORARY = ".tmp"
_WRITING = re.compile(rf"[.][0-9a-f]{{16}}{re.escape(_TEMPORARY)}")
_BLOCK = 8 << 20  # bytes that are sent at a time
_AT_ONCE = 32  # directories that are removed at the same time


# Stores that create a file only where there is none, as fsspec's file systems for them do with mode="create".
_CREATE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
_BULK = {"s3", "s3a", "gs", "gcs"}  # stores without directories, whose files fsspec removes by the hundred
_one_at_a_time = threading.Lock()  # memory:// looks first, then creates


class _Exists(FileExistsError):
    """Passes through the errors of other stores."""


class Unavailable(StoreError):
    """The store is busy or fails, or the connection to it, or an answer was lost: the same request may succeed later. Whether it
    has done what it was asked for is not known.
    """


@dataclass(frozen=True)
class Store(ABC):
    """A flat directory of files. Errors are those of the operating system, `StoreError` where another store has them."""

    path: str

    def locate(self, name: str) -> str:
        """The path or URL of a file, as errors name it."""
        return os.path.join(self.path, name)

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The whole of a small file."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file."""

    def sizes(self, names: list[str]) -> dict[str, int]:
        """The sizes of many files, if asking for all at once is quicker than one by one. May leave out any."""
        return {}

    @abstractmethod
    def glob(self, pattern: str) -> list[str]:
        """The files that match, as errors name them, sorted. ``*``, ``?`` and ``[…]`` may also be in the store's own path."""

    @abstractmethod
    def below(self) -> dict[str, int | None]:
        """All files in the directory and below it, by their names from here, with their sizes if the listing has them; none if it
        is not there.
        """

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[Read]:
        """A function that reads parts of a file."""

    def clean(self) -> None:  # noqa: B027 - most stores keep nothing of what was not finished
        """Remove what a killed `write` has left."""

    @abstractmethod
    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file of these parts, whole or not at all, also if they raise. Replaces an old one. Durable when it returns."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all, if there is none of this name; else raise `FileExistsError`. Of any number of
        writers at once, one creates it. Durable when it returns, and what is there is durable when it raises `FileExistsError`.

        `Unavailable`: the store may have done it, or not. After any other error it has not.
        """

    @abstractmethod
    def remove(self, ours: re.Pattern[str]) -> None:
        """Remove the directory with its files, if it is there. If it has a name that is not one of ``ours``, this raises
        `BadPath` and removes nothing: others may have moved a directory of the user's here, where they may not remove anything.
        """

    def remove_each(self, names: Iterable[str], ours: re.Pattern[str]) -> None:
        """`remove` the directories of these names in it."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: replace(self, path=self.locate(name)).remove(ours), names))

    def check(self) -> None:  # noqa: B027 - of a directory there is nothing to know beforehand
        """Raise `BadArgument` if the package for the store is missing, or its options are wrong, before it is used."""

    def check_create(self) -> None:  # noqa: B027 - a directory can
        """Raise `BadArgument` if `create` cannot be called."""


class Local(Store):
    """A directory of a mounted file system. Its files are never links."""

    def read(self, name: str) -> bytes:
        return read_whole(DISK, self.locate(name), follow=True)

    def size(self, name: str) -> int:
        path = self.locate(name)
        status = DISK.status(path, follow=False)
        check_regular(status, path)
        return status.st_size

    def glob(self, pattern: str) -> list[str]:
        return sorted(DISK.glob(self.locate(pattern)))

    def below(self) -> dict[str, int | None]:
        with opening(self.path, "batch"):
            try:
                kinds = DISK.kinds(self.path)
            except (FileNotFoundError, NotADirectoryError):  # also of a directory that was removed since it was listed
                return {}
        found: dict[str, int | None] = {name: None for name, is_file in kinds.items() if is_file}
        for name in kinds.keys() - found.keys():
            found |= {f"{name}/{file}": None for file in Local(self.locate(name)).below()}
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[Read]:
        with Descriptors([DISK.open_to_read(self.locate(name))]) as (fd,):
            yield lambda start, end: DISK.read(fd, end - start, start)

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        with self._reached() as (files, place), self._written(files, place, name, parts) as (temporary, target):
            files.rename(temporary, target)
            try:
                files.sync_directory(place)
            except Broken:
                files.unlink(target)  # else the next time it would pass for one that is there
                raise

    def create(self, name: str, data: bytes) -> None:
        with self._reached() as (files, place), self._written(files, place, name, [data]) as (temporary, target):
            try:
                files.link(temporary, target)
            except FileExistsError:
                files.sync_directory(place)  # its writer may have been killed before that
                raise
            try:
                files.sync_directory(place)
                files.unlink(temporary)
            except OSError as error:  # it is there, so no other error may say that it is not
                raise Broken(f"the disk does not say whether this is stored: {error.strerror}", path=target) from error

    @contextmanager
    def _written(self, files: Files, place: str, name: str, parts: Iterable[bytes]) -> Iterator[tuple[str, str]]:
        """The parts in a durable file of another name, which goes if the block raises; and the path that it is to have."""
        temporary, target = os.path.join(place, f".{secrets.token_hex(8)}{_TEMPORARY}"), os.path.join(place, name)
        try:
            self._make(files, place)
            with Descriptors([files.open(temporary, new=True)]) as (fd,):
                at = 0
                for part in parts:
                    files.write(fd, part, at)
                    at += len(part)
                files.sync(fd)
            yield temporary, target
        except BaseException as error:
            with suppress(FileNotFoundError, NotADirectoryError):
                files.unlink(temporary)
            if isinstance(error, OSError) and error.errno in FULL:
                raise DiskFull(f"no room on the file system: {error.strerror}", path=self.locate(name)) from error
            if isinstance(error, FileNotFoundError):  # it was there, or made, just now
                said = "this directory was moved or removed while a file was written into it, which is not in place; try again"
                raise BadPath(said, path=place) from error
            raise

    def remove(self, ours: re.Pattern[str]) -> None:
        with self._reached() as (files, place):
            for attempt in range(5):
                try:
                    names = files.list(place)
                    if other := next((name for name in names if not (ours.fullmatch(name) or _WRITING.fullmatch(name))), None):
                        said = f"it has a file {excerpt(other, 120)}, which is not ours, so it was left as it is; see what it is"
                        raise BadPath(said, path=place)
                    for name in names:
                        files.unlink(os.path.join(place, name))
                    return files.remove_directory(place)
                except FileNotFoundError:
                    if not files.exists(place):
                        return  # else somebody else removes it too
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY or attempt == 4:  # somebody still writes there
                        raise

    def clean(self) -> None:
        """Remove what a killed `write` has left. A `write` that is under way fails."""
        with self._reached() as (files, place):
            if files.is_directory(place):
                for name in files.list(place):
                    if name.startswith(".") and name.endswith(_TEMPORARY):
                        files.unlink(os.path.join(place, name))

    @contextmanager
    def _reached(self) -> Iterator[tuple[Files, str]]:
        """What changes something here, and the whole path. The directory itself is not a link."""
        place = os.path.abspath(self.path)
        files = files_of(None, os.path.dirname(place))
        try:
            with refusing(place, "batch"), files.entered():
                yield files, place
        finally:
            files.leave()

    def _make(self, files: Files, place: str) -> None:
        _make_directories(os.path.dirname(place))
        files.enter()
        if not files.is_directory(place):
            with suppress(FileExistsError):
                files.make_directory(place)
            files.sync_directory(os.path.dirname(place))


def _make_directories(path: str) -> None:
    if not DISK.is_directory(path, follow=True):
        if DISK.exists(path):  # as a file, or a link that leads nowhere
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        _make_directories(os.path.dirname(path))
        with suppress(FileExistsError):
            DISK.make_directory(path)
        DISK.sync_directory(os.path.dirname(path))


@dataclass(frozen=True)
class Remote(Store):
    """A directory that fsspec reaches under a URL."""

    options: Mapping[str, Any] = field(repr=False)  # there may be secrets among them

    def read(self, name: str) -> bytes:
        with self._errors(name):
            system, path = self._reach(name)
            # s3fs would ask for the size first, to get what is large in parts.
            return bytes(system.cat_file(path, **({"max_concurrency": 1} if self._scheme in ("s3", "s3a") else {})))

    def size(self, name: str) -> int:
        with self._errors(name):
            system, path = self._reach(name)
            return int(system.info(path)["size"])

    def sizes(self, names: list[str]) -> dict[str, int]:
        if not names:
            return {}
        with self._errors(names[0]):
            system, _ = self._reach(names[0])
            with suppress(FileNotFoundError):  # does not say which
                return dict(zip(names, system.sizes([self._reach(name)[1] for name in names]), strict=True))
        return {}

    def glob(self, pattern: str) -> list[str]:
        with self._errors(pattern):
            system, path = self._reach(pattern)
            return sorted(system.unstrip_protocol(found) for found in system.glob(path))

    def below(self) -> dict[str, int | None]:
        with self._errors(""), suppress(FileNotFoundError):
            system, path = self._reach("")
            top = path.rstrip("/") + "/"
            # One listing of all, which stores give by the thousand; a pattern would be one for each directory.
            return {found.removeprefix(top): about.get("size") for found, about in system.find(top, detail=True).items()}
        return {}

    @contextmanager
    def open(self, name: str) -> Iterator[Read]:
        with self._errors(name):
            system, path = self._reach(name)

        def read(start: int, end: int) -> bytes:
            if start == end:
                return b""
            try:
                with self._errors(name, start):
                    return bytes(system.cat_file(path, start=start, end=end))
            except StoreError:  # each kind of store says in its own way that the file ends before start
                if self.size(name) <= start:
                    return b""
                raise

        yield read

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        with self._errors(name):
            system, path = self._reach(name)
        if self._scheme in _CREATE:  # what is small is one request, which such a store does whole
            parts, first = iter(parts), bytearray()
            for part in parts:
                first += part
                if len(first) >= _BLOCK:
                    parts = chain([bytes(first)], parts)
                    break
            else:
                with self._errors(name):
                    system.pipe_file(path, bytes(first))
                return
        with self._errors(name):
            # What is not committed never becomes an object; leaving `with` would make one of a part.
            begin = partial(system.open, path, "wb", block_size=_BLOCK, autocommit=False)
            try:
                file = begin()
            except FileNotFoundError:  # only a store with real directories needs one: of s3 it would make a bucket
                system.makedirs(os.path.dirname(path), exist_ok=True)
                file = begin()
        try:
            for part in parts:
                with self._errors(name):
                    file.write(part)
            with self._errors(name):
                file.close()
                if hasattr(file, "commit"):  # else the store cannot do better
                    file.commit()
        except BaseException:
            with suppress(Exception):
                file.discard()
            raise

    def create(self, name: str, data: bytes) -> None:
        self.check_create()
        with self._errors(name):
            system, path = self._reach(name)
            try:
                with _one_at_a_time if self._scheme == "memory" else nullcontext():
                    system.pipe_file(path, data, mode="create")
            except Exception as error:
                if isinstance(error, FileExistsError) or status_of(error) == 412:
                    raise _Exists(errno.EEXIST, "is there", self.locate(name)) from None
                raise

    def remove(self, ours: re.Pattern[str]) -> None:
        with self._errors(""), suppress(FileNotFoundError):
            system, path = self._reach("")
            system.rm(path.rstrip("/"), recursive=True)

    def remove_each(self, names: Iterable[str], ours: re.Pattern[str]) -> None:
        if self._scheme not in _BULK:
            return super().remove_each(names, ours)
        found: dict[str, list[str]] = {name: [] for name in names}
        for file in self.below():
            name, _, rest = file.partition("/")
            if rest and name in found:
                found[name].append(file)
        alone = {name for name, files in found.items() if re.search(r"[*?\[]", "".join(files))}  # would pass for patterns
        files = [self._reach(file)[1] for name in found.keys() - alone for file in found[name]]
        super().remove_each(alone, ours)
        with self._errors(""):
            system, _ = self._reach("")
            for last in False, True:  # the manifest is there until the rest is gone: a kill leaves nothing that no listing shows
                if some := [file for file in files if file.endswith(".json") == last]:
                    with suppress(FileNotFoundError):  # somebody else removes them too
                        system.rm(some)

    def check(self) -> None:
        self._reach("")

    def check_create(self) -> None:
        if self._scheme not in _CREATE:
            these = ", ".join(sorted(_CREATE))
            raise BadArgument(f"{self._scheme}:// cannot create a file only where there is none; these can: file, {these}")

    @property
    def _scheme(self) -> str:
        return urlsplit(self.path).scheme.lower()

    def _reach(self, name: str) -> tuple[Any, str]:
        """The file system and the path in it; made in the process that uses it, for its connections do not survive a fork."""
        try:
            from fsspec.core import url_to_fs  # late: only who uses such a store needs it
        except ModuleNotFoundError:
            raise BadArgument(f"{self.path}: a URL needs the package fsspec: pip install 'qewqew[fsspec]'") from None
        try:
            # A listing that is kept from before would say that what was written since is not there.
            system, path = url_to_fs(self.locate(name), use_listings_cache=False, **self.options)
        except (ImportError, ValueError) as error:  # fsspec's texts say which package is missing, or which scheme is unknown
            text = self._without_secrets(str(error))
            raise BadArgument(f"{self.path}: {text}; {_needs(self.path)}") from None
        return system, str(path)

    @contextmanager
    def _errors(self, name: str, offset: int | None = None) -> Iterator[None]:
        """Let every error name the file. Each kind of store has errors of its own, and they may quote options."""
        url = self.locate(name)
        try:
            yield
        except (StoreError, BadArgument, _Exists):
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, self._without_secrets(str(error)) or "not found", url) from None
        except Exception as error:
            text = self._without_secrets(str(error)).partition("\n")[0]  # pyarrow's for hdfs is a hundred lines
            kind = StoreError if is_final(error) else Unavailable
            raise kind(f"{type(error).__name__}: {text}", path=url, offset=offset) from None

    def _without_secrets(self, text: str) -> str:
        return secrecy.hide(text, {f"fs.{name}": value for name, value in self.options.items()})


def _needs(url: str) -> str:
    package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}
    scheme = urlsplit(url).scheme.lower()
    if scheme in package:
        return f"{scheme}:// needs the package {package[scheme]}: pip install 'qewqew[fsspec]' {package[scheme]}"
    return "fsspec's documentation says which package a scheme needs, and which options it has"


def is_url(path: str) -> bool:
    """Whether this is the URL of a store or a `file:` URI, and not the path of a file."""
    return re.match(r"file:/|[A-Za-z][A-Za-z0-9+.-]+(::|://)", path, re.IGNORECASE) is not None


def local_path(path: str) -> str | None:
    """The path of a file on a mounted file system, given a path or a `file:` URI; None for the URL of another store.

    Raises `BadArgument` for a `file:` URI of another host, or with a secret: it does not name a directory.
    """
    if re.match(r"file:/", path, re.IGNORECASE) is None:
        return None if is_url(path) else path
    if any(secrecy.secrets_of("", path)):
        raise BadArgument(f"{path!r} does not name a directory; pass options separately")
    rest = path[len("file:") :]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
        if host not in ("", "localhost") or not rest:
            shown = host.rpartition("@")[2]
            raise BadArgument(f"{path!r} is on host {shown!r}; give an absolute path of this machine, such as file:///PATH")
    # Hadoop takes what follows file: literally, a proper URI escapes it.
    try:
        return rest if DISK.exists(rest) else unquote(rest)
    except (OSError, ValueError):  # who opens it is told
        return rest


def store_of(path: str, options: Mapping[str, Any] | None = None) -> Store:
    """The store of the files in a directory, given its path or URL.

    ``options`` are those of fsspec's file system (for s3: ``endpoint_url``, ``profile`` …), as text or as values. Texts that are
    true or false, or begin with { or [, are read as JSON. One may be ``{"env": NAME}`` or ``{"file": PATH}``, whose value is read
    now. But leave secrets to the environment, where the client of each store looks for them: options travel with the tasks of a
    job.

    Raises `BadArgument`, here or when the store is first used: if the URL has a password in it, if an option is not valid JSON,
    or if the package for the store is not installed.
    """
    local = local_path(path)
    if local is not None:
        return Local(arguments.check_path_text("batch", local) if local else local)
    if "?" in path or "#" in path:
        shown = secrecy.hide(path.partition("?")[0])
        raise BadArgument(f"{shown!r}: a URL with ? or # does not name a directory; pass options separately")
    if any(secrecy.secrets_of("", path)):
        scheme = path.partition(":")[0]
        raise BadArgument(
            f"the {scheme} URL contains a password, which logs would show; pass it as an option or in the environment"
        )
    values = {name: _value(name, value) for name, value in (options or {}).items()}
    return Remote(path.rstrip("/"), references.resolved(values))


def _value(name: str, value: Any) -> Any:
    if isinstance(value, str) and (value in ("true", "false") or value[:1] in ("{", "[")):
        try:
            return json.loads(value)
        except ValueError as error:
            raise BadArgument(f"option {name!r} of the store begins like JSON but is not valid: {type(error).__name__}") from None
    return value
