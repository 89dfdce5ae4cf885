"""Access to a folder that no other user can have changed: the cache's, or one for dumps.

A `Root` opens the folder once and accesses everything below through that descriptor, so renaming a folder
above it cannot replace the code that is executed. Each folder below and each file must belong to this user
(or to the superuser), must not be writable for others and must not be a symbolic link. If the system has no
user ids, the ownership rules are skipped; if it has no folder descriptors, full paths are used.
"""

from __future__ import annotations

import os
import stat

from veomni_hook.ownership import ownership_problem

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from typing import Self

__all__ = ["TEMPORARY_SUFFIX", "Defect", "Root", "Vanished", "write_problem"]

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# Without O_NONBLOCK, a named pipe instead of a file would block the import until someone writes to it.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_FOLDER = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_DIRECTORY", 0)
_BY_DESCRIPTOR = {os.open, os.stat, os.mkdir, os.rename, os.unlink, os.rmdir} <= os.supports_dir_fd
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISFIFO, "a named pipe"),
)
TEMPORARY_SUFFIX = ".tmp"  # of the temporary files of `Root.write`


class Defect(Exception):
    """Why something in the cache is not used; caught inside this package and turned into a reason."""


class Vanished(Defect):
    """Something is missing, or being removed: a writer may retry once."""


class Root:
    """An opened folder; names are relative to it, with ``/``. Close it with `close()`.

    Attributes:
        folder_mode: mode of the folders that it creates.
        file_mode: mode of the files that it creates.
        private_group: whether a group that contains only this user may write.
    """

    __slots__ = ("descriptor", "path")
    folder_mode = 0o700
    file_mode = 0o600
    private_group = False

    def __init__(self, path: str) -> None:
        """Open `path`, a normalised absolute path. Raises Defect if it is missing or cannot be trusted."""
        self.path = path
        self.descriptor: int | None = None
        try:
            if _BY_DESCRIPTOR:
                self.descriptor = os.open(path, _FOLDER)
                status = os.fstat(self.descriptor)
            else:
                status = os.lstat(path)
            self._check(status, path, folder=True)
        except OSError as error:
            self.close()
            raise _defect(error, path) from error
        except Defect:
            self.close()
            raise

    @classmethod
    def create(cls, path: str) -> Self:
        """Open `path`; create it and its parents if missing. Raises OSError or Defect."""
        missing: list[str] = []
        folder = path
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            try:
                os.mkdir(folder, cls.folder_mode)
            except FileExistsError:
                continue  # another writer was faster; opening checks the root
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; the object cannot be used afterwards."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def full(self, name: str) -> str:
        """The absolute path of `name`."""
        return os.path.join(self.path, name.replace("/", os.sep))

    def status(self, name: str) -> os.stat_result:
        """lstat; raises OSError."""
        return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def check_folders(self, name: str) -> None:
        """Check every folder from the root down to `name`; raises Defect."""
        end = 0
        while end < len(name):
            end = name.find("/", end + 1)
            if end < 0:
                end = len(name)
            self._check_folder(name[:end])

    def make_folders(self, name: str) -> None:
        """Create `name` and the folders above it. Raises OSError, or Defect for an untrusted one."""
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            folder = "/".join(parts[:end])
            try:
                os.mkdir(self._at(folder), self.folder_mode, dir_fd=self.descriptor)
            except FileExistsError:
                pass  # checked like all the others
            # Check before creating the next one: a link would put it into another user's folder.
            self._check_folder(folder)

    def open_raw(self, name: str, flags: int) -> int:
        """Open `name`, which must not be a symbolic link; no other checks. Raises OSError."""
        return os.open(self._at(name), flags | _NOFOLLOW, self.file_mode, dir_fd=self.descriptor)

    def open_file(self, name: str, *, create: bool = False) -> int:
        """Open the regular file `name`; raises Defect. Check the folders above it first."""
        try:
            descriptor = self.open_raw(name, _READ | (os.O_CREAT if create else 0))
        except OSError as error:
            raise _defect(error, self.full(name)) from error
        try:
            self._check(os.fstat(descriptor), self.full(name), folder=False)
        except Defect:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str) -> bytes:
        """Read the regular file `name`; raises Defect. Check the folders above it first."""
        descriptor = self.open_file(name)
        try:
            size = os.fstat(descriptor).st_size
            data = os.read(descriptor, size + 1)
            while len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
                data += more
            return data
        except OSError as error:
            raise _defect(error, self.full(name)) from error
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Atomically replace `name` (even a link) with `data`, synced beforehand; raises OSError."""
        folder, slash, _ = name.rpartition("/")
        temporary = f"{folder}{slash}.{os.urandom(8).hex()}{TEMPORARY_SUFFIX}"
        descriptor = self.open_raw(temporary, _CREATE)
        try:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.rename(temporary, name)
        except BaseException:
            try:
                self.unlink(temporary)
            except OSError:
                pass  # report the first error; `clear` removes the leftover
            raise

    def rename(self, name: str, target: str) -> None:
        """os.replace; raises OSError."""
        os.replace(self._at(name), self._at(target), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file; raises OSError."""
        os.unlink(self._at(name), dir_fd=self.descriptor)

    def rmdir(self, name: str) -> None:
        """Remove an empty folder; raises OSError."""
        os.rmdir(self._at(name), dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder and its content, following no links; raises OSError."""
        import shutil

        shutil.rmtree(self._at(name), dir_fd=self.descriptor)

    def names(self, name: str = "") -> list[str]:
        """The sorted names in a folder, which must not be a symbolic link; raises OSError."""
        if not _BY_DESCRIPTOR:
            return sorted(os.listdir(self.full(name)))
        descriptor = os.open(name or ".", _FOLDER, dir_fd=self.descriptor)
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    def _check(self, status: os.stat_result, path: str, *, folder: bool) -> None:
        wanted = stat.S_ISDIR if folder else stat.S_ISREG
        if not wanted(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "a special file")
            raise Defect(f"{path} is {kind}, not a {'folder' if folder else 'regular file'}")
        problem = ownership_problem(status, private_group=self.private_group)
        if problem:
            raise Defect(f"{path} {problem}")

    def _check_folder(self, name: str) -> None:
        try:
            self._check(self.status(name), self.full(name), folder=True)
        except OSError as error:
            raise _defect(error, self.full(name)) from error

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else self.full(name)


def write_problem(path: str) -> str:
    """Why an existing folder cannot be written; empty when it can."""
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"


def _defect(error: OSError, path: str) -> Defect:
    if isinstance(error, FileNotFoundError):
        return Vanished(f"{path} is missing")
    # The error of O_NOFOLLOW depends on the system (ELOOP, EMLINK, ENOTDIR), so check the file itself.
    try:
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        is_link = False
    return Defect(f"{path} is a symbolic link" if is_link else f"{path}: {error.strerror or error}")
