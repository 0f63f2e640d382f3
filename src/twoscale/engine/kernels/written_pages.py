"""Has some memory been written? Asked of Linux (6.7 or newer), which knows it for every page without reading the memory.

The pages are write-protected by userfaultfd in its asynchronous mode: the first write to a page takes one page fault more, about a
microsecond, and marks the page. PAGEMAP_SCAN then finds marked pages, 128,000 pages (500 MB) in about a millisecond. No write can be missed
by design: the processor itself stops it, whichever thread writes, also inside of a system call.

Only private anonymous memory is answered for: a file or shared memory may be changed by another process. Where the system cannot tell
(other systems, older kernels, containers that forbid userfaultfd, a child process after a fork) the answer is that the memory may have been
written.
"""

import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Sequence
from weakref import WeakSet

PAGE = os.sysconf("SC_PAGE_SIZE")
Span = tuple[int, int]
"""Address and bytes."""

_SYSCALLS = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # what processes without privileges may ask for
_API, _FEATURES = 0xAA, 1 << 13 | 1 << 15  # UFFD_FEATURE_WP_UNPOPULATED, UFFD_FEATURE_WP_ASYNC
_WRITTEN, _FILE, _PRESENT = 1 << 1, 1 << 2, 1 << 3  # categories of pages


def _ioctl_number(kind: int, number: int, size: int) -> int:
    """_IOWR of asm-generic/ioctl.h."""
    return 3 << 30 | size << 16 | kind << 8 | number


_UFFDIO_API = _ioctl_number(0xAA, 0x3F, 24)
_UFFDIO_REGISTER = _ioctl_number(0xAA, 0x00, 32)
_UFFDIO_WRITEPROTECT = _ioctl_number(0xAA, 0x06, 24)
_PAGEMAP_SCAN = _ioctl_number(ord("f"), 16, 96)


def whole_pages(address: int, size: int) -> Span:
    """The pages that lie in this memory as a whole; perhaps none (0 bytes)."""
    first, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    return first, max(0, end - first)


class _System:
    """The process's file descriptors. A child process must not use its parent's: they mean the parent's memory."""

    def __init__(self) -> None:
        if sys.platform != "linux" or platform.machine() not in _SYSCALLS:  # the number means something else on other systems
            raise OSError("no userfaultfd on this system")
        self.libc = ctypes.CDLL(None, use_errno=True)
        number = _SYSCALLS[platform.machine()]
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self.uffd = self.libc.syscall(number, flags)
        if self.uffd < 0:
            self.uffd = self.libc.syscall(number, flags | _USER_MODE_ONLY)
        if self.uffd < 0:
            raise OSError("userfaultfd is not permitted")
        try:
            self.ioctl(self.uffd, _UFFDIO_API, struct.pack("QQQ", _API, _FEATURES, 0))
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self.uffd)
            raise

    def ioctl(self, file: int, request: int, argument: bytes) -> int:
        buffer = ctypes.create_string_buffer(argument, len(argument))
        result: int = self.libc.ioctl(file, ctypes.c_ulong(request), buffer)
        if result < 0:
            raise OSError(ctypes.get_errno(), "ioctl")
        return result

    def protect(self, span: Span) -> None:
        self.ioctl(self.uffd, _UFFDIO_REGISTER, struct.pack("QQQQ", *span, 1 << 1, 0))
        self.ioctl(self.uffd, _UFFDIO_WRITEPROTECT, struct.pack("QQQ", *span, 1 << 0))

    def has_pages(self, span: Span, any_of: int, inverted: int = 0) -> bool:
        """Whether a page is in one of these categories, or not in one that is `inverted`. OSError if the memory is no longer protected."""
        address, size = span
        found = ctypes.create_string_buffer(24)
        check_protection = 1 << 1
        fields = (96, check_protection, address, address + size, 0, ctypes.addressof(found), 1, 1, inverted, 0, any_of, any_of)
        return self.ioctl(self.pagemap, _PAGEMAP_SCAN, struct.pack("12Q", *fields)) > 0


_LOCK = threading.RLock()
_SYSTEM: dict[int, _System | None] = {}
"""By process id; None where the system cannot tell."""
_WATCHES: "WeakSet[PageWatch]" = WeakSet()


def _new_lock() -> None:
    """In a child process: another thread of the parent may have held the lock."""
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def _system() -> _System | None:
    process = os.getpid()
    if process not in _SYSTEM:
        try:
            _SYSTEM[process] = _System()
        except (OSError, AttributeError):
            _SYSTEM[process] = None
    return _SYSTEM[process]


class PageWatch:
    """Tells whether pages were written since the watch was made. A newer watch on the same pages ends an older one."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """A span is whole pages; those of 0 bytes are allowed."""
        self.spans, self._process = list(spans), os.getpid()
        self._watched, self._valid = [span for span in self.spans if span[1]], False
        with _LOCK:
            for watch in list(_WATCHES):
                if watch._overlaps(self.spans):
                    watch._valid = False
            _WATCHES.add(self)
            self._valid = self._begin()

    def _begin(self) -> bool:
        system = _system()
        try:
            for span in self._watched if system else ():
                assert system is not None
                system.protect(span)
            return system is not None and not any(system.has_pages(span, _FILE) for span in self._watched)
        except OSError:
            return False

    def unwritten(self) -> bool:
        """True if no byte was written since; False if one may have been."""
        with _LOCK:
            self._valid = self._valid and self._unwritten()
            return self._valid

    def _unwritten(self) -> bool:
        system = _system()
        try:  # pages that are absent were swapped out or dropped
            return (
                system is not None
                and self._process == os.getpid()
                and not any(system.has_pages(span, _WRITTEN | _PRESENT, inverted=_PRESENT) for span in self._watched)
            )
        except OSError:
            return False

    def _overlaps(self, spans: Sequence[Span]) -> bool:
        return any(a < b + m and b < a + n for a, n in self._watched for b, m in spans if m)
