"""Writing small files so that a crash at any instant leaves the old contents or the new ones."""

import contextlib
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


def sync_file(path: str) -> None:
    """Make the contents of a file survive a power cut; one that is not there any more needs none of it."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def boot_id() -> str:
    """Changes when the machine is started anew; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
