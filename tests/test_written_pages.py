"""PageWatch: a write to watched memory is never missed, and where the system cannot tell, the memory counts as written."""

import mmap
import multiprocessing
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from twoscale.engine.kernels import fingerprint as fingerprints, written_pages
from twoscale.engine.kernels.written_pages import PAGE, PageWatch, whole_pages

knows = pytest.mark.skipif(written_pages._system() is None, reason="this system does not tell which pages were written")
SIZE = 40 * PAGE


def floats() -> torch.Tensor:
    return torch.randn(SIZE // 4 + PAGE)


def watch(*tensors: torch.Tensor) -> PageWatch:
    return PageWatch([whole_pages(t.data_ptr(), 4 * t.numel()) for t in tensors])


@pytest.mark.parametrize(("address", "size", "want"), [
    (PAGE, PAGE, (PAGE, PAGE)), (PAGE + 1, PAGE, (2 * PAGE, 0)), (PAGE - 1, PAGE + 2, (PAGE, PAGE)), (5, 9, (PAGE, 0)),
])  # fmt: skip
def test_whole_pages(address: int, size: int, want: tuple[int, int]) -> None:
    """Pages that are partly other memory are left out."""
    assert whole_pages(address, size) == want


@knows
def test_every_write_is_seen() -> None:
    """One byte at any place, by any means, ends a watch; reading does not."""
    weight = floats()
    start, size = whole_pages(weight.data_ptr(), 4 * weight.numel())

    def in_place(i: int) -> None:
        weight.data[i] = 1.0

    def by_numpy(i: int) -> None:
        weight.numpy()[i] = 1.0

    def by_the_kernel(i: int) -> None:
        with open("/dev/zero", "rb", buffering=0) as file:
            file.readinto(memoryview(weight.numpy()).cast("B")[4 * i : 4 * i + 4])

    def by_process_memory(i: int) -> None:
        with open("/proc/self/mem", "r+b", buffering=0) as file:
            file.seek(weight.data_ptr() + 4 * i)
            file.write(b"\0\0\0\0")

    @given(st.integers(0, size // 4 - 1), st.sampled_from([in_place, by_numpy, by_the_kernel, by_process_memory]))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def check(i: int, write) -> None:
        found = watch(weight)
        weight.sum()
        assert found.unwritten()
        write((start - weight.data_ptr()) // 4 + i)
        assert not found.unwritten() and not found.unwritten()

    check()


@knows
def test_a_newer_watch_ends_an_older_one() -> None:
    """Both protect the same pages: what the older one would miss is the newer one's. Other memory is not concerned."""
    shared, other = floats(), floats()
    old, apart = watch(shared), watch(other)
    shared[PAGE] = 1.0
    new = watch(shared)
    assert not old.unwritten() and new.unwritten() and apart.unwritten()


@knows
def test_memory_of_others_counts_as_written(tmp_path) -> None:
    """Shared memory and files may be changed by another process; freed memory is another memory when it comes back."""
    shared = floats().share_memory_()
    assert not watch(shared).unwritten()
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    mapped = torch.from_numpy(np.memmap(tmp_path / "weights", np.float32, "c"))
    assert not watch(mapped).unwritten()
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(SIZE)
    found = watch(torch.frombuffer(memory, dtype=torch.float32))
    assert found.unwritten()
    memory.madvise(mmap.MADV_DONTNEED)  # zeros, without a write
    assert not found.unwritten()


def _in_child(found: PageWatch, weight: torch.Tensor, answers) -> None:
    own = watch(weight)
    before = own.unwritten()
    weight[PAGE] = 5.0
    answers.put((found.unwritten(), before, own.unwritten()))


@knows
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_process() -> None:
    """A parent's watch does not hold in its child; a child's own sees its own memory, and the parent's is as it was."""
    weight = floats()
    found, context = watch(weight), multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(found, weight, answers))
    child.start()
    assert answers.get(timeout=60) == (False, True, False)
    child.join()
    assert found.unwritten()


@pytest.mark.parametrize(("name", "value"), [("sys.platform", "darwin"), ("platform.machine", lambda: "riscv64")])
def test_other_systems_are_not_asked(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call is made by its number, which means something else on another system: there memory counts as written."""
    monkeypatch.setattr(f"twoscale.engine.kernels.written_pages.{name}", value)
    monkeypatch.setattr(written_pages, "_SYSTEM", {})
    monkeypatch.setattr(written_pages.ctypes, "CDLL", lambda *args, **how: pytest.fail("the system was asked"))
    assert not watch(floats()).unwritten()


@pytest.mark.parametrize("can_tell", [pytest.param(True, marks=knows), False])
def test_fingerprint_reads_what_was_written(can_tell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight is read again only where it may have been written; its edges and small weights always are. Any change is seen."""
    if not can_tell:
        monkeypatch.setitem(written_pages._SYSTEM, os.getpid(), None)
    model = nn.Linear(1024, 1024)
    read: list[int] = []
    hashes = fingerprints._hashes
    monkeypatch.setattr(fingerprints, "_hashes", lambda memory: read.append(sum(n for _, n in memory)) or hashes(memory))

    def bytes_read() -> int:
        read.clear()
        fingerprints.fingerprint(model)
        return sum(read)

    want = fingerprints.fingerprint(model)
    everything = 4 * (1024 * 1024 + 1024)
    assert bytes_read() == everything if not can_tell else bytes_read() < 4 * PAGE
    assert fingerprints.fingerprint(model) == want
    for i in (0, 1, 500_000, -1):
        old = float(model.weight.data.view(-1)[i])
        model.weight.data.view(-1)[i] = old + 1
        assert fingerprints.fingerprint(model) != want
        model.weight.data.view(-1)[i] = old
        assert fingerprints.fingerprint(model) == want
    model.weight.data = model.weight.data.clone()
    assert bytes_read() == everything
