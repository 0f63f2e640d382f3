"""The paper's claims on geometry, each judged by a rule that is stated beside the verdict; those on exits are in exit_claims.py.

A claim is a pure function of geometry.jsonl. It may come out confirmed, refuted or undecided, and says on which numbers. Where the model
was measured before training too, the same rule is applied to it: a rule that an untrained model passes says nothing on training.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twoscale.config.words import group_label, group_number

Outcome = Literal["confirmed", "refuted", "undecided"]
Record = dict[str, Any]
EARLY, LATE = 1, 10  # loop steps that claim (a) compares; step 0 leaves the noise and is left out
LEVEL, LAST = 5, 10  # loop steps that the last level of a cosine is the mean of, and that must lie near it
STEADY, MOVING = 0.1, 0.3  # distances from that level


@dataclass(frozen=True)
class Claim:
    """One claim of the paper with this run's answer."""

    letter: str
    text: str
    rule: str
    measured: str
    outcome: Outcome


@dataclass(frozen=True)
class Level:
    """Where the cosine of consecutive steps of one group ends up."""

    value: float
    """Mean over the last LEVEL steps that count."""
    away: float
    """The largest distance from it over the last LAST steps that count."""
    reached: int
    """The first loop step from which on it stays within STEADY; the one after the last where it does not."""
    first: int
    last: int
    """The LAST steps that count, from and to."""


def judge(records: Sequence[Record], loops_at: Callable[[int], float | None] = lambda step: None, in_stages: bool = False) -> list[Claim]:
    """Claims (a) to (d) on the records of a run, oldest first; `loops_at` is the mean number of loops in training at a step, where it is
    known."""
    return [_decay(records), _cosines(records), _training(records, loops_at, in_stages), _drift(records)]


def decay_ratio(group: Record) -> float | None:
    """Mean step norm at k = 10 over that at k = 1."""
    means = group["step_norm"]["mean"]
    known = len(means) > LATE and means[EARLY] and means[LATE] is not None
    return means[LATE] / means[EARLY] if known else None


def cosine_level(group: Record) -> Level | None:
    """The level of a group's cosines; None where too few steps count (a step counts if half of the tokens move by more than rounding)."""
    cosine = group.get("step_cosine")
    if cosine is None or not cosine["count"]:
        return None
    enough = max(cosine["count"]) / 2
    counted = [
        (k, m) for k, (m, n) in enumerate(zip(cosine["mean"], cosine["count"], strict=True), start=1) if m is not None and n >= enough
    ]
    if len(counted) < LAST:
        return None
    value = sum(m for _, m in counted[-LEVEL:]) / LEVEL
    moving = [k for k, m in counted if abs(m - value) > STEADY]
    reached = next((k for k, _ in counted if not moving or k > moving[-1]), counted[-1][0] + 1)
    return Level(value, max(abs(m - value) for _, m in counted[-LAST:]), reached, counted[-LAST][0], counted[-1][0])


def _decay(records: Sequence[Record]) -> Claim:
    def outcome(record: Record) -> Outcome:
        known = [r for g in record["groups"] if (r := decay_ratio(g)) is not None]
        if any(r > 0.5 for r in known):
            return "refuted"
        return "confirmed" if len(known) == len(record["groups"]) and all(r <= 0.25 for r in known) else "undecided"

    def numbers(record: Record) -> str:
        return "; ".join(f"{group_label(i, g['name'])}: {_percent(decay_ratio(g))}" for i, g in enumerate(record["groups"]))

    return Claim(
        "a",
        "Inside a loop, step norms decay within 5 to 10 steps.",
        "The mean step norm at k = 10, as a share of that at k = 1 (k = 0 leaves the start state). "
        "Confirmed at 25 % or less in every group, refuted above 50 % in any.",
        numbers(records[-1]) + _control(records, outcome),
        outcome(records[-1]),
    )


def _cosines(records: Sequence[Record]) -> Claim:
    def outcome(record: Record) -> Outcome:
        known = [level.away for g in record["groups"] if (level := cosine_level(g)) is not None]
        if any(away > MOVING for away in known):
            return "refuted"
        return "confirmed" if len(known) == len(record["groups"]) and all(away <= STEADY for away in known) else "undecided"

    parts = []
    for i, group in enumerate(records[-1]["groups"]):
        level = cosine_level(group)
        if level is None:
            words = "too few steps above rounding"
        else:
            words = f"{level.value:+.2f}, at most {level.away:.2f} away from it over k = {level.first} to {level.last}"
        parts.append(f"{group_label(i, group['name'])}: {words}")
    return Claim(
        "b",
        "The cosines of consecutive steps come to a steady value.",
        f"The steady value is the mean cosine over the last {LEVEL} loop steps that count (half of the tokens still move by more than "
        f"rounding, 1e-6 of the state). Confirmed when over the last {LAST} of them the mean cosine stays within {STEADY:.2f} of it in "
        f"every group, refuted when it is more than {MOVING:.2f} away in any. How soon the value is reached is not part of the rule.",
        "; ".join(parts) + _control(records, outcome),
        outcome(records[-1]),
    )


def _control(records: Sequence[Record], outcome: Callable[[Record], Outcome]) -> str:
    """What the rule says of the same model before training, where it was measured."""
    if not records[0]["step"] == 0 < records[-1]["step"]:
        return ""
    before, after = outcome(records[0]), outcome(records[-1])
    learned = ", so passing the rule is no effect of training" if before == after == "confirmed" else ""
    return f". Control: before training the rule says {before}{learned}{_different_texts(records[0], records[-1])}"


def _training(records: Sequence[Record], loops_at: Callable[[int], float | None], in_stages: bool) -> Claim:
    trained = [r for r in records if r["step"] > 0]
    rule = (
        "From the first measurement after training began to the last: the share of claim (a), and the loop step k from which on the cosine "
        f"stays within {STEADY:.2f} of the steady value of claim (b). Where the rule of (b) does not confirm that it is steady, k lies "
        "beyond all; it is not compared where it is so both times. Confirmed when both fall in every group, refuted when one and the same "
        "of the two rises in every group, none of them left out; shares that print alike are equal."
    )
    text = "Both, the decay of (a) and the steadiness of (b), strengthen with training"
    if len(trained) < 2:
        missing = "only one measurement: train with train.geometry_interval, or trace several checkpoints"
        return Claim("c", f"{text}.", rule, missing, "undecided")
    first, last = trained[0], trained[-1]
    parts: list[str] = []
    decays: list[float] = []  # changes over training, for each group where both ends were measured
    levels: list[float] = []
    for i, (a, b) in enumerate(zip(first["groups"], last["groups"], strict=True)):
        before, after = decay_ratio(a), decay_ratio(b)
        if before is not None and after is not None:
            decays.append(_as_printed(after) - _as_printed(before))
        cos_a, cos_b = cosine_level(a), cosine_level(b)
        if cos_a is None or cos_b is None:
            shown = "k not measurable"
        elif cos_a.away > STEADY < cos_b.away:
            shown = "k not defined (by the rule of (b) not shown to be steady at either time)"
        else:
            k_a, k_b = (math.inf if cos.away > STEADY else cos.reached for cos in (cos_a, cos_b))
            levels.append(k_b - k_a)
            shown = f"k {_loop_step(k_a)}, then {_loop_step(k_b)}"
        parts.append(f"{group_label(i, b['name'])}: share {_percent(before)}, then {_percent(after)}; {shown}")
    n = len(last["groups"])
    outcome: Outcome = "undecided"
    if len(decays) == len(levels) == n and max(*decays, *levels) < 0:
        outcome = "confirmed"
    elif any(len(changes) == n and min(changes) > 0 for changes in (decays, levels)):
        outcome = "refuted"
    measured = f"training step {first['step']}, then {last['step']}: " + ". ".join(parts)
    if outcome == "refuted":
        names = {"the share": decays, "the loop step k": levels}
        risen = [name for name, changes in names.items() if len(changes) == n and min(changes) > 0]
        measured += f". In every group {' and '.join(risen)} {'rises' if len(risen) == 1 else 'rise'}"
    short, long = STAGES if in_stages else _different_loops(first["step"], last["step"], loops_at)
    text += f" (here from training step {first['step']} to {last['step']}{short})."
    return Claim("c", text, rule, measured + long + _different_texts(first, last), outcome)


STAGES = (
    "; trained in stages",
    ". Training went in stages whose batches differed; the number of loops is recorded for one stage only, so the change may be one of "
    "settings",
)
"""A remark, short and long, on a model that was trained in stages."""


def _different_loops(first: int, last: int, loops_at: Callable[[int], float | None]) -> tuple[str, str]:
    """A remark, short and with the numbers, where training drew its loops about another mean at one step than at the other; both are empty
    where the mean was the same, or is not known."""
    a, b = loops_at(first), loops_at(last)
    if a is None or b is None or a == b:
        return "", ""
    numbers = f". The mean number of loops in training differed: {a:.3g} at step {first}, {b:.3g} at step {last}"
    return "; the mean number of loops in training differed", numbers


def _loop_step(k: float) -> str:
    return "none (by the rule of (b) not shown to be steady)" if math.isinf(k) else f"{k:.0f}"


def _different_texts(first: Record, last: Record) -> str:
    """A remark where two measurements are of different texts, as those of a model that was trained elsewhere are."""
    a, b = first.get("source"), last.get("source")
    if a is None or b is None or a == b:  # older versions named none
        return ""
    return f". The two were measured on different held-out text ({a}; {b})"


def _drift(records: Sequence[Record]) -> Claim:
    first, last = records[0], records[-1]
    rule = (
        "DLR with the next group's last state above the line and the mean step over k ≥ 1 below it (`settled`, k ≥ 1). "
        "Confirmed at 3 or more at every boundary, refuted below 1 at any."
    )
    text = "Between groups the state drifts much farther than the mean loop step: DLR ≫ 1."

    def outcome(record: Record) -> Outcome:
        known = [r for b in record["boundaries"] if (r := b["dlr"]["settled_k1"]["mean"]) is not None]
        if any(r < 1 for r in known):
            return "refuted"
        return "confirmed" if known and len(known) == len(record["boundaries"]) and all(r >= 3 for r in known) else "undecided"

    if not last["boundaries"]:
        return Claim("d", text, rule, "there is one group only", "undecided")
    missing = "not defined (a group has no step after the first, or never moves)"
    parts = []
    for i, b in enumerate(last["boundaries"]):
        ratio = b["dlr"]["settled_k1"]["mean"]
        parts.append(f"{boundary_label(i, b)}: {missing if ratio is None else f'{ratio:.1f}'}")
    measured = "; ".join(parts)
    if first["step"] == 0 < last["step"]:
        untrained = [b["dlr"]["settled_k1"]["mean"] for b in first["boundaries"]]
        measured += f" (before training: {', '.join('not defined' if r is None else f'{r:.1f}' for r in untrained)})"
    return Claim("d", text, rule, measured + _control(records, outcome), outcome(last))


def boundary_label(b: int, boundary: Record) -> str:
    """`group 1 (layer 4) to 2 (layers 5-6)`."""
    return f"{group_label(b, boundary['from'])} to {group_number(b + 1, boundary['to'])}"


def _as_printed(share: float) -> float:
    """A share in percent as `_percent` rounds it, so that shares that print alike count as equal."""
    return float(_percent(share).removesuffix(" %"))


def _percent(share: float | None) -> str:
    """A share in percent: whole, below 10 % two significant digits."""
    if share is None:
        return "not measured"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
