"""The paper's claims on geometry, each judged by a rule that is stated beside the verdict; those on exits are in verdict.py.

A claim is a pure function of geometry.jsonl. It may come out confirmed, refuted or undecided, and says on which numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["confirmed", "refuted", "undecided"]
EARLY, LATE = 1, 10  # loop steps that claim (a) compares; step 0 leaves the noise and is left out
WINDOW = 5  # loop steps in an average of cosines


@dataclass(frozen=True)
class Claim:
    """One claim of the paper with this run's answer."""

    letter: str
    text: str
    rule: str
    measured: str
    outcome: Outcome


def judge(records: Sequence[dict[str, Any]]) -> list[Claim]:
    """Claims (a) to (d) on the records of a run, oldest first."""
    last = records[-1]
    return [_decay(last), _cosines(last), _training(records), _drift(records)]


def decay_ratio(group: dict[str, Any]) -> float | None:
    """Mean step norm at k = 10 over that at k = 1."""
    means = group["step_norm"]["mean"]
    known = len(means) > LATE and means[EARLY] and means[LATE] is not None
    return means[LATE] / means[EARLY] if known else None


def cosine_levels(group: dict[str, Any]) -> tuple[float, float, int] | None:
    """Mean cosine over k = 4 .. 8, over the last five steps that still count (most tokens above rounding), and the last of them."""
    cosine = group.get("step_cosine")
    if cosine is None or not cosine["count"]:
        return None
    enough = max(cosine["count"]) / 2
    counted = [
        (k, m) for k, (m, n) in enumerate(zip(cosine["mean"], cosine["count"], strict=True), start=1) if m is not None and n >= enough
    ]
    if len(counted) < 3 + 2 * WINDOW:
        return None
    early, late = [m for _, m in counted[3 : 3 + WINDOW]], [m for _, m in counted[-WINDOW:]]
    return sum(early) / WINDOW, sum(late) / WINDOW, counted[-1][0]


def _decay(last: dict[str, Any]) -> Claim:
    ratios = {g["name"]: decay_ratio(g) for g in last["groups"]}
    known = [r for r in ratios.values() if r is not None]
    outcome: Outcome = "undecided"
    if any(r > 0.5 for r in known):
        outcome = "refuted"
    elif len(known) == len(ratios) and all(r <= 0.25 for r in known):
        outcome = "confirmed"
    measured = "; ".join(f"group {n}: {_percent(r)}" for n, r in ratios.items())
    return Claim(
        "a",
        "Inside a loop, step norms decay within 5 to 10 steps.",
        "The mean step norm at k = 10, as a share of that at k = 1 (k = 0 leaves the start state). "
        "Confirmed at 25 % or less in every group, refuted above 50 % in any.",
        measured,
        outcome,
    )


def _cosines(last: dict[str, Any]) -> Claim:
    levels = {g["name"]: cosine_levels(g) for g in last["groups"]}
    parts = []
    for name, level in levels.items():
        if level is None:
            parts.append(f"group {name}: too few steps above rounding")
        else:
            parts.append(f"group {name}: {level[0]:+.2f} to {level[1]:+.2f} (by k = {level[2]})")
    changes = [abs(level[1] - level[0]) for level in levels.values() if level is not None]
    outcome: Outcome = "undecided"
    if len(changes) == len(levels):
        outcome = "confirmed" if max(changes) <= 0.1 else "refuted" if max(changes) > 0.3 else "undecided"
    elif changes and max(changes) > 0.3:
        outcome = "refuted"
    return Claim(
        "b",
        "The cosines of consecutive steps settle at a steady value.",
        "The mean cosine over k = 4 to 8 against the last five steps that most tokens take above rounding (1e-6 of the state). "
        "Confirmed when no group moves by more than 0.10, refuted when any moves by more than 0.30.",
        "; ".join(parts),
        outcome,
    )


def _training(records: Sequence[dict[str, Any]]) -> Claim:
    trained = [r for r in records if r["step"] > 0]
    rule = (
        "From the first measurement after training began to the last: the share of claim (a), and the change of cosines of claim (b). "
        "Confirmed when both fall in every group, refuted when either rises in every group."
    )
    text = "Both strengthen with training."
    if len(trained) < 2:
        return Claim("c", text, rule, "only one measurement: train with train.geometry_interval, or trace several checkpoints", "undecided")
    first, last = trained[0], trained[-1]
    parts: list[str] = []
    decays: list[float] = []  # changes over training, for each group where both ends were measured
    wobbles: list[float] = []
    for a, b in zip(first["groups"], last["groups"], strict=True):
        before, after = decay_ratio(a), decay_ratio(b)
        if before is not None and after is not None:
            decays.append(after - before)
        cos_a, cos_b = cosine_levels(a), cosine_levels(b)
        if cos_a is not None and cos_b is not None:
            wobbles.append(abs(cos_b[1] - cos_b[0]) - abs(cos_a[1] - cos_a[0]))
        shown = f"{abs(cos_a[1] - cos_a[0]):.2f} to {abs(cos_b[1] - cos_b[0]):.2f}" if cos_a and cos_b else "not measurable"
        parts.append(f"group {b['name']}: share {_percent(before)} to {_percent(after)}, change of cosine {shown}")
    n = len(last["groups"])
    outcome: Outcome = "undecided"
    if len(decays) == len(wobbles) == n and max(*decays, *wobbles) < 0:
        outcome = "confirmed"
    elif any(len(changes) == n and min(changes) > 0 for changes in (decays, wobbles)):
        outcome = "refuted"
    return Claim("c", text, rule, f"step {first['step']} to {last['step']}: " + "; ".join(parts), outcome)


def _drift(records: Sequence[dict[str, Any]]) -> Claim:
    first, last = records[0], records[-1]
    rule = (
        "DLR with the next group's last state above the line and the mean step over k ≥ 1 below it (`settled`, k ≥ 1). "
        "Confirmed at 3 or more at every boundary, refuted below 1 at any."
    )
    text = "Between groups the state drifts much farther than a loop step: DLR ≫ 1."
    ratios = {f"{b['from']} to {b['to']}": b["dlr"]["settled_k1"]["mean"] for b in last["boundaries"]}
    known = [r for r in ratios.values() if r is not None]
    if not ratios:
        return Claim("d", text, rule, "there is one group only", "undecided")
    outcome: Outcome = "undecided"
    if any(r < 1 for r in known):
        outcome = "refuted"
    elif len(known) == len(ratios) and all(r >= 3 for r in known):
        outcome = "confirmed"
    missing = "not defined (a group has no step after the first, or never moves)"
    measured = "; ".join(f"{n}: {missing if r is None else f'{r:.1f}'}" for n, r in ratios.items())
    if first["step"] == 0 < last["step"]:
        untrained = [b["dlr"]["settled_k1"]["mean"] for b in first["boundaries"]]
        measured += f" (before training: {', '.join('not defined' if r is None else f'{r:.1f}' for r in untrained)})"
    return Claim("d", text, rule, measured, outcome)


def _percent(share: float | None) -> str:
    if share is None:
        return "not measured"
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"
