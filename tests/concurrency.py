"""Work done by several threads at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def at_once(work: Callable[[int], object], n: int = 4) -> list[object]:
    """work(0) .. work(n - 1) by n threads that start together."""
    barrier = threading.Barrier(n)

    def one(i: int) -> object:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))
