"""A new file for HDF5 to write into, which survives a full disk and hands the kernel large writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.files import start_writeback

_GATHERED_BYTES = 4 << 20


class NewFile:
    """A new file for HDF5 to write, through h5py's driver for Python's files; a context manager that closes it.

    HDF5 writes much of a file when it closes objects, and crashes where such a write fails. So a failed write is kept, what
    HDF5 goes on to write is dropped, and the error is raised when HDF5 is done, or by `check`.
    Small writes that follow each other, such as chunks of 90 KB, are gathered, as the kernel spends less time on large ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._error: OSError | None = None
        self._stream = path.open("w+b", buffering=0)
        self._gathered = memoryview(bytearray(_GATHERED_BYTES))
        self._start = self._count = self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Stand at another place of the file."""
        if whence != os.SEEK_SET:
            self.flush()
            offset = self._stream.seek(offset, whence)
        self._position = offset
        return offset

    def tell(self) -> int:
        """Where the file stands."""
        return self._position

    def read(self, size: int) -> bytes:
        """Read from where the file stands."""
        self.flush()
        return os.pread(self._stream.fileno(), size, self._position)

    def readinto(self, buffer: memoryview) -> int:
        """Read from where the file stands."""
        self.flush()
        return os.preadv(self._stream.fileno(), [buffer], self._position)

    def write(self, data: memoryview) -> int:
        """Write all of it where the file stands."""
        view = memoryview(data).cast("B")
        size = len(view)
        if self._position != self._start + self._count:
            self.flush()
        if not self._count:
            self._start = self._position
        self._position += size
        while len(view):
            # up to a multiple of the buffer's size in the file
            room = _GATHERED_BYTES - (self._start + self._count) % _GATHERED_BYTES
            if not self._count and len(view) >= room:
                whole = room + (len(view) - room) // _GATHERED_BYTES * _GATHERED_BYTES
                self._write_out(view[:whole])
                self._start += whole
            else:
                whole = min(len(view), room)
                self._gathered[self._count : self._count + whole] = view[:whole]
                self._count += whole
                if whole == room:
                    self.flush()
            view = view[whole:]
        return size

    def truncate(self, size: int) -> None:
        """Set the file's size."""
        self.flush()
        self._kept(os.ftruncate, self._stream.fileno(), size)

    def flush(self) -> None:
        """Hand over what was gathered."""
        self._write_out(self._gathered[: self._count])
        self._start, self._count = self._start + self._count, 0

    def start_writeback(self) -> None:
        """Have the kernel begin to write to the disk what is there."""
        self.flush()
        start_writeback(self._stream.fileno())

    def _write_out(self, view: memoryview) -> None:
        position = self._start
        while len(view) and self._error is None:
            count = self._kept(os.pwrite, self._stream.fileno(), view, position)
            view, position = view[count:], position + count

    def _kept(self, call: Callable[..., Any], *arguments: Any) -> int:
        try:
            return call(*arguments) or 0
        except OSError as error:
            self._error = self._error or OSError(error.errno, error.strerror, str(self._path))
            return 0

    def check(self) -> None:
        """Raise the error of a write.

        Raises:
            OSError: as the write did, such as for a full disk.
        """
        if self._error is not None:
            raise self._error

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()
        self._stream.close()
        if kind is None or not issubclass(kind, OSError):
            self.check()
