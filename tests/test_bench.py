"""`twoscale bench decode` runs and says what it promises; no test looks at the times."""

import pytest

from conftest import CommandLine
from twoscale.config import presets


def test_decode(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps against the floor, rules, saved time, batches, the parallel pass and the cache are all in the answer."""
    monkeypatch.setattr(presets, "small", presets.nano)
    words = ("bench", "decode", "--preset", "nano", "--contexts", 8, "--batches", 1, 2, "--loops", 4, "--repeats", 1)
    code, out, _ = cli(*words)
    assert code == 0
    for word in ("floor", "batch  2, context    8", "Acceleration", "of the loop work saved", "teacher-forced", "Huginn", "last", "1.00x"):
        assert word in out, word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--contexts", 64), "context of 64"),
        (("--loops", 1), "--loops is at least 2"),
        (("--batches", 0), "at least 1"),
        (("--repeats", 0), "at least 1"),
    ],
    ids=str,
)
def test_bad_decode(words: tuple[object, ...], said: str, cli: CommandLine) -> None:
    """Settings that make no sense are one line and exit code 2."""
    code, _, err = cli("bench", "decode", "--preset", "nano", *words)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1
