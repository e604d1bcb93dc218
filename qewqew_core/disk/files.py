"""The file-system calls that everything above goes through, so that tests can crash, tear and fill the disk.

`Files` is the real disk and has no policy: callers decide what must be durable, and in which order. Errors are those of the
system. Questions change nothing. A change is durable only if its docstring says so."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import MutableSequence, Sequence
from functools import cache, partial
from pathlib import Path

from qewqew_core.disk.descriptors import MOST_HOLES, Descriptors, end_of_data, open_into, open_to_write
from qewqew_core.disk.directories import Directories, check_led, listed
from qewqew_core.errors import Broken, Corrupt

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")  # that the system writes at once
_MISSING = FileNotFoundError, NotADirectoryError
_NO_TMPFILE = errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL
SMALL = 1 << 16  # bytes; headers, lock files and the .rdx of readers have far fewer
_LARGEST = 0x7FFFF000  # that the system reads at once; logs and manifests have far fewer


class Files(Directories):
    """The real file system. The tests' simulated disk loses everything that these calls do not guarantee.

    What is in the directory of a store (`Directories`) is reached from there. Elsewhere a path is followed as the user wrote it.

    What is made is for its owner alone, or for the members of the group from `files_of`, whatever the umask is. What root makes
    belongs to the owner of the store, who would be locked out otherwise: to that of the first of the paths from `files_of` that
    is there, or of the directory.
    """

    # Questions. If other processes change the same files, the answer may be out of date at once.

    def open_to_read(self, path: str, *, follow: bool = False) -> int:
        """A descriptor of a regular file. Anything else is an error; a pipe does not block."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            opened = self._opened(path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP or not follow:
                raise
            opened = Descriptors()
            target, owner = self._led_to(path)
            open_into(target, opened, flags)
            check_led(opened, path, owner)
        try:
            check_regular(os.fstat(opened[0]), path)
            self._check_owner(opened[0], path)
        except BaseException:
            opened.close()
            raise
        return opened.pop()

    def check_ours(self, path: str) -> None:
        """Where others may write, raise what `open` would if the file, or a directory on the way, is not one of ours."""
        if self._is_shared:
            with self._opened(path, os.O_PATH | os.O_NOFOLLOW) as (fd,):
                self._check_owner(fd, path)

    def check_kind(self, path: str, is_directory: bool = False) -> os.stat_result | None:
        """The same, wherever it is, and whether it is such a directory, else a regular file, and this user may use it. Returns
        its status; None: there is nothing.
        """
        try:
            with self._opened(path, os.O_PATH | os.O_NOFOLLOW) as (fd,):
                self._check_owner(fd, path)
                status = os.fstat(fd)
        except FileNotFoundError:
            return None
        if not (stat.S_ISDIR if is_directory else stat.S_ISREG)(status.st_mode):
            number = errno.ENOTDIR if is_directory or not stat.S_ISDIR(status.st_mode) else errno.EISDIR
            raise OSError(number, "not a directory" if is_directory else "not a regular file", path)
        if not self._at(path, _may_use, is_directory):
            if not self.exists(path):  # any more
                return None
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return status

    def _opened(self, path: str, flags: int) -> Descriptors:
        opened = Descriptors()
        self._at(path, open_into, opened, flags)
        return opened

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end of the file. What was written is read, synced or not."""
        data = os.pread(fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
            data += more
        return data

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def status(self, file: str | int, *, follow: bool = True) -> os.stat_result:
        """What the system knows about a file, by its path or descriptor. Without ``follow`` a link itself is the file."""
        return os.stat(file, follow_symlinks=follow) if isinstance(file, int) else self._at(file, os.stat, follow_symlinks=follow)

    # These look at where the path leads by now, not into the directory that is open: it may have been moved.

    def is_at(self, fd: int, path: str) -> bool:
        """Whether this open file is the one at the path: neither it nor a directory above it was moved, removed or replaced."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(fd))
        except _MISSING:
            return False

    def inode_and_size(self, path: str) -> tuple[tuple[int, int], int]:
        """Device and inode, and size. They differ if another process has replaced the file or appended to it."""
        status = os.stat(path)
        return (status.st_dev, status.st_ino), status.st_size

    def identity(self, path: str) -> tuple[int, int]:
        """Inode, and time of the last change in nanoseconds. They differ if another program has replaced the file."""
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns

    def modified(self, path: str) -> int:
        """When the file was last changed, milliseconds since the epoch."""
        return self._at(path, os.stat, follow_symlinks=False).st_mtime_ns // 1_000_000

    # What is there must not pass for missing when the disk fails: these raise what the system says.

    def exists(self, path: str) -> bool:
        """Whether the name exists, even as a link that leads nowhere."""
        try:
            self._at(path, os.stat, follow_symlinks=False)
        except _MISSING:
            return False
        return True

    def is_directory(self, path: str, *, follow: bool = False) -> bool:
        """Whether there is a directory. A link to one counts only with ``follow``."""
        try:
            return stat.S_ISDIR(self._at(path, os.stat, follow_symlinks=follow).st_mode)
        except _MISSING:
            return False

    def is_regular(self, path: str) -> bool:
        """Whether there is a regular file. A link does not count."""
        try:
            return stat.S_ISREG(self._at(path, os.stat, follow_symlinks=False).st_mode)
        except _MISSING:
            return False

    def is_link(self, path: str) -> bool:
        """Whether there is a symbolic link, wherever it leads."""
        try:
            return stat.S_ISLNK(self._at(path, os.stat, follow_symlinks=False).st_mode)
        except _MISSING:
            return False

    def resolved(self, path: str) -> str:
        """The path without links, as far as it exists."""
        return os.path.realpath(path)

    def kinds(self, path: str, *, directories: bool = False) -> dict[str, bool]:
        """The names in a directory, in no order, and whether each is a regular file, or else a directory (a link is neither)."""
        return self._in(path, partial(listed, partial(_kinds, "is_dir" if directories else "is_file")))

    def glob(self, pattern: str) -> list[str]:
        """The paths that match, in no order; those whose names begin with a dot only if the pattern says so."""
        return glob.glob(pattern)

    def list(self, path: str) -> list[str]:
        """The names in a directory, in no order."""
        return self._in(path, partial(listed, os.listdir))

    def may_use(self, path: str) -> bool:
        """Whether this user may read and write it, and make files in it if it is a directory."""
        return os.access(path, os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0), effective_ids=_differ())

    def check_writable(self, directory: str) -> None:
        """Raise what the system would say to a new file in this directory."""
        self._in(directory, _check_writable)

    def free(self, path: str) -> int:
        """Bytes that an ordinary user can still write to the file system of this directory."""
        status = self._in(path, os.statvfs)
        return status.f_bavail * status.f_frsize

    def capacity(self, path: str) -> int:
        """Bytes that the file system of this directory has, free or not."""
        status = self._in(path, os.statvfs)
        return status.f_blocks * status.f_frsize

    def boot(self) -> bytes:
        """Names this run of the machine: after a power cut it is another one. Empty if the system does not say."""
        return _boot()

    # Changes

    def open(self, path: str, *, new: bool = False) -> int:
        """A descriptor for reading and writing; links are not followed. ``new`` makes the file, empty, and fails if it exists;
        its name is durable after `sync_directory` of its parent.
        """
        opened = Descriptors()
        Files.open_into(self, opened, path, new=new)
        return opened.pop()

    def open_into(
        self, descriptors: MutableSequence[int], path: str, *, make: bool = False, new: bool = False, follow: bool = False
    ) -> None:
        """The same, into a list: an interrupt finds the file opened and in the list, or neither. ``make`` makes it if it does not
        exist. ``follow``: it may be a link to a file that is there, both of them ours.
        """
        with Descriptors() as fds:
            try:
                if not new or self.group is None or not self._at(path, self._make_for_group, fds, path):
                    self._at(path, open_to_write, fds, os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if new else 0))
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    return Files.open_into(self, descriptors, path, new=True)
                return Files.open_into(self, descriptors, path, make=True)  # somebody else has made it meanwhile
            except OSError as error:
                if error.errno != errno.ELOOP or not follow:
                    raise
                try:
                    target, owner = self._led_to(path)
                    open_to_write(target, fds, os.O_NOFOLLOW)
                except FileNotFoundError:
                    raise OSError(errno.ELOOP, "it leads to nothing", path) from None
                check_led(fds, path, owner)
                check_regular(os.fstat(fds[0]), path)
            if new:
                self._made(fds[0], path)
            else:
                self._check_owner(fds[0], path)
            fds.hand_over(descriptors)

    def _make_for_group(self, name: str, fds: Descriptors, path: str, dir_fd: int | None = None) -> bool:
        """Make a file that others in the group may use from the moment when it has its name: who is killed before leaves none.
        False: this file system has no files without a name.
        """
        try:
            open_to_write(os.path.dirname(name) or ".", fds, os.O_TMPFILE, dir_fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            return False
        self._made(fds[0], path)
        try:
            os.link(f"/proc/self/fd/{fds[0]}", name, src_dir_fd=fds[0], dst_dir_fd=dir_fd, follow_symlinks=True)
        except OSError:
            fds.close()
            raise
        return True

    def _led_to(self, path: str) -> tuple[str, int]:
        """What a link of ours leads to, and whose the link is."""
        with self._opened(path, os.O_PATH | os.O_NOFOLLOW) as (fd,):
            self._check_owner(fd, path)
            return os.path.realpath(os.path.join(os.path.dirname(path), os.readlink("", dir_fd=fd))), os.fstat(fd).st_uid

    def write(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """All of ``data`` at ``offset``. Durable only after `sync`; may be torn by a crash or an error before that."""
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            written += os.pwrite(fd, data[written:], offset + written)

    def write_all(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """The same for buffers that are to lie side by side, without a copy of them; not many more than a thousand."""
        if len(buffers) == 1:
            self.write(fd, buffers[0], offset)
            return
        written = os.pwritev(fd, buffers[:_MOST_BUFFERS], offset)
        if written < sum(map(len, buffers)):
            self.write(fd, b"".join(buffers)[written:], offset + written)

    def allocate(self, fd: int, size: int) -> None:
        """Make the file ``size`` bytes long and really reserve them, so that writing there cannot meet a full disk. Durable only
        after `sync`.
        """
        status = os.fstat(fd)
        # xfs wants room for all that it is asked for, also for what the file has already.
        begin = status.st_size if status.st_blocks * 512 >= status.st_size else 0
        if begin < size:
            os.posix_fallocate(fd, begin, size - begin)

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file off, or extend it with zeros, which take no room. Durable only after `sync`."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Make bytes and size of the file durable. Raises `Broken`: nobody knows what is on disk, so do not call it again."""
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise failed_sync(error, _path_of(fd)) from error

    def drop_cached(self, fd: int) -> None:
        """Let the system forget what it has of the file in memory and takes for written. If an fsync has failed, it takes for
        written what is not on disk: that is read, and ext4 never writes again into blocks that were allocated for it.
        """
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, path: str) -> None:
        """Make durable which files were created in this directory, renamed to or from it, and removed. Raises as `sync`."""
        self._in(path, partial(_sync_directory, path))

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces a file at ``target``. Durable after `sync_directory` of both parents."""
        self._from_to(source, target, os.rename)
        self._gone(source)

    def link(self, source: str, target: str) -> None:
        """A second name for a file. Durable after `sync_directory` of the target's parent."""
        self._from_to(source, target, os.link, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        """Remove the name; with its last name and descriptor the file goes. Durable after `sync_directory` of the parent."""
        self._at(path, os.unlink)

    def make_directory(self, path: str) -> None:
        """Make a directory, for its owner alone or the group. Durable after `sync_directory` of its parent."""
        self._at(path, os.mkdir, self._modes[True] & 0o777)
        with self._opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as (fd,):
            self._made(fd, path)

    def _made(self, fd: int, path: str) -> None:
        """Give what we have just made at the path to whom it belongs."""
        status, made = os.fstat(fd), f"/proc/self/fd/{fd}"
        mode = self._modes[stat.S_ISDIR(status.st_mode)]
        # A directory with something in it was put here by somebody who may write here: that is not what we have made.
        is_roots = status.st_uid == 0 and not (stat.S_ISDIR(status.st_mode) and os.listdir(made))
        if self.group is not None and (is_roots or status.st_uid == os.geteuid()) and status.st_gid != self.group:
            os.chown(made, -1, self.group)  # before the mode gives it rights
        if status.st_mode & mode != mode:  # the umask has taken rights, or only this call gives them
            os.chmod(made, mode)
        if is_roots:
            for other in (*self._owned_as, os.path.dirname(path)):
                with contextlib.suppress(OSError):  # it is not there; or we may give nothing away, as in some containers
                    is_home = other in (self._base, os.path.dirname(path))
                    owner = self._in(other, os.stat) if is_home else self.status(other, follow=False)
                    if other != path:
                        os.chown(made, owner.st_uid, owner.st_gid if self.group is None else self.group)
                        return

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory. Durable after `sync_directory` of its parent."""
        self._at(path, os.rmdir)
        self._gone(path)


def _kinds(question: str, directory: str | int) -> dict[str, bool]:
    with os.scandir(directory) as entries:
        return {entry.name: getattr(entry, question)(follow_symlinks=False) for entry in entries}


def _may_use(name: str, is_directory: bool, dir_fd: int | None = None) -> bool:
    """Whether this user may do with it what an opening does, if the file system is mounted for writing."""
    may = partial(os.access, name, dir_fd=dir_fd, effective_ids=_differ())
    return may(wanted := os.R_OK | (os.X_OK if is_directory else 0)) and (may(wanted | os.W_OK) or _is_read_only(name, dir_fd))


def _is_read_only(name: str, dir_fd: int | None) -> bool:
    return bool(os.statvfs(name if dir_fd is None else dir_fd).f_flag & os.ST_RDONLY)


def _check_writable(directory: str | int) -> None:
    place, home = (directory, None) if isinstance(directory, str) else (".", directory)
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK, dir_fd=home, effective_ids=_differ()):
        number = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number), directory)


def _differ() -> bool:
    return os.geteuid() != os.getuid()  # else the plain call, which knows more of NFS and ACLs


def _sync_directory(path: str, directory: str | int) -> None:
    with Descriptors() as fds:
        if isinstance(directory, str):
            fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            os.fsync(directory if isinstance(directory, int) else fds[0])
        except OSError as error:
            raise failed_sync(error, path) from error


@cache
def _boot() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def check_regular(status: os.stat_result, path: str) -> None:
    """Raise what the system might say if an open file is something else: a pipe or a device can be opened, too."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def failed_sync(error: OSError, path: str | None) -> Broken:
    """What a sync raises, whatever the system's error. It never passes for a full disk: the kernel may have dropped what was
    written, and would report success the next time.
    """
    return Broken(
        f"an fsync failed: {error.strerror}. What was written may be lost, so it is not tried again: the object refuses every "
        "further call. Check the disk, then open it again: that recovers all that was committed",
        path=path,
    )


def _path_of(fd: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return None


DISK = Files()  # for those to whom nobody gives another


def files_of(files: Files | None, base: str, *owned_as: str, group: int | None = None) -> Files:
    """For a store in the directory ``base``. What it makes is whose the first of these paths is that is there, and all members
    of the ``group`` may use it. ``files``: a test's.
    """
    files = files or Files()
    files.reach_from(base, owned_as, group)
    return files


def look_into(base: str, *owned_as: str, files: Files | None = None) -> Files:
    """For a look at a store in the directory ``base``, which is entered, if it is there, until nobody has these files any more.
    What it opens is ours as what a store opens, or belongs to the group whose directory it is.
    """
    files = files or Files()
    files.reach_from(base, owned_as, None, looks=True)
    with contextlib.suppress(FileNotFoundError):
        files.enter()
    return files


def read_whole(files: Files, path: str, *, follow: bool = False, most: int = _LARGEST, sparse: bool = False) -> bytes:
    """All of a regular file, as `read_all`; errors of opening it pass through."""
    with Descriptors() as fds:
        fds.append(files.open_to_read(path, follow=follow))
        return read_all(files, fds[0], path, most, sparse)


def check_size(size: int, path: str, most: int) -> None:
    """Raise `Corrupt` if the file has more bytes than any such file of ours."""
    if size > most:
        raise Corrupt(f"has {size:,} bytes, more than any such file of QewQew; move it away, then repair", path=path)


def read_all(files: Files, fd: int, path: str, most: int = _LARGEST, sparse: bool = False) -> bytes:
    """All of an open file, but of a large one not the hole at its end. Raises `Corrupt` if it has more bytes than any such file
    of ours (``most``), or is a hole for the most part: neither costs memory or time. ``sparse``: it may be, and is read as it is.
    """
    size = files.size(fd)
    check_size(size, path, most)
    return files.read(fd, size if sparse or size <= MOST_HOLES else end_of_data(fd, path), 0)


def write_new(files: Files, path: str, data: bytes, fds: list[int] | None = None) -> None:
    """Make a file with this content, durable but for its name, in place of what is at ``path``. ``fds`` gets its descriptor;
    without ``fds`` it is closed.
    """
    if files.exists(path):
        files.unlink(path)
    with Descriptors() as mine:
        mine.append(files.open(path, new=True))
        try:
            files.write(mine[0], data, 0)
            files.sync(mine[0])
        except BaseException:
            mine.close()
            files.unlink(path)
            raise
        if fds is not None:
            mine.hand_over(fds)


def drop_cached(files: Files, path: str) -> None:
    """As `Files.drop_cached`, of the file at a path, if there is one."""
    with contextlib.suppress(FileNotFoundError), Descriptors([files.open(path)]) as (fd,):
        files.drop_cached(fd)


def list_if_there(files: Files, path: str) -> list[str]:
    """The names in a directory; none if it is missing: git and archives of files forget an empty one."""
    try:
        return files.list(path)
    except FileNotFoundError:
        return []


def remove_if_there(files: Files, path: str) -> None:
    if files.exists(path):
        files.unlink(path)
