"""The task model in the package: its figures, reproduced."""

import twoscale
from twoscale.interop.load import IN_THE_PACKAGE
from twoscale.tasks.file import load_task
from twoscale.tasks.measure import measure_staircase
from twoscale.tasks.staircase import load_staircase


def test_figures() -> None:
    """At least 98 % of the answers at every depth are right with 16 steps, and few with less steps than the depth, as its card says."""
    model, tokenizer = twoscale.load("hops")
    folder = IN_THE_PACKAGE["hops"]
    task, said = load_task(folder), load_staircase(folder)
    assert task is not None and said is not None and tokenizer is not None
    found = measure_staircase(model, task, 16, 96, seed=1)
    assert list(found.depths) == list(said.depths) == list(range(1, 13))
    for depth, right in zip(found.depths, found.accuracy, strict=True):
        assert right[15] >= 0.98 and right[depth - 1] >= 0.98, (depth, right)
        assert all(share < 0.5 for share in right[: depth - 1]), (depth, right)


def test_size() -> None:
    """The model takes less than a megabyte."""
    assert sum(file.stat().st_size for file in IN_THE_PACKAGE["hops"].iterdir()) < 1_000_000
