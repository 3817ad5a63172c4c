"""Files: replaced so that a crash at any instant leaves the old contents or the new ones, synced, and locked."""

import contextlib
import errno
import fcntl
import os
import threading


def atomic_write(path: str, data: bytes, *, sync: bool = False) -> None:
    """Replace the file at `path`. `sync` makes it survive a power cut too. Raises OSError.

    The temporary name is the thread's own, so that two writers cannot mix their bytes.
    """
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, data)
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_directory(os.path.dirname(path) or ".")


def remove_leftovers(path: str) -> None:
    """Remove what `atomic_write` to that path left when its process was killed in the middle."""
    directory, name = os.path.split(path)
    with contextlib.suppress(OSError):
        for found in os.listdir(directory or "."):
            writer = found.removeprefix(f"{name}.").partition(".")[0]
            ours = found.startswith(f"{name}.{writer}.") and found.endswith(".tmp") and writer.isdecimal()
            if ours and not os.path.exists(f"/proc/{writer}"):
                os.unlink(os.path.join(directory, found))


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write everything, however many calls that takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: str) -> None:
    """Make names created or replaced in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: str, *, sync: bool = False) -> None:
    """Like `os.makedirs(path, exist_ok=True)`; with `sync` every new level survives a power cut. Raises OSError."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        if parent != path:
            make_directories(parent, sync=sync)
        with contextlib.suppress(FileExistsError):  # another process was faster, or it is a file: see below
            os.mkdir(path)
        if not os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if sync:
            sync_directory(parent)


def sync_file(path: str) -> None:
    """Make the contents of a file survive a power cut; one that is not there any more needs none of it."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


class FileLocked(BlockingIOError):
    """Somebody else has locked the file; `holder` is what they wrote into it, if anything."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)
        self.holder = holder


def lock_file(path: str, *, holder: str = "") -> int:
    """Open a file, made if it is not there, and lock it; the descriptor, which releases the lock when it is closed.

    The kernel closes it however the process ends. `holder` is written into the file, for those who find it locked.
    Raises FileLocked, or OSError if the file cannot be opened or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = os.pread(fd, 64, 0).decode("ascii", "replace").strip() if holder else ""
        os.close(fd)
        raise FileLocked(path, found) from None
    except OSError:
        os.close(fd)
        raise
    if holder:
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is only a courtesy
            os.ftruncate(fd, 0)
            os.pwrite(fd, holder.encode(), 0)
    return fd
