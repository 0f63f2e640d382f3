"""The Drift-to-Loop Ratio between two groups: how far the state moves from one to the next, beside a step inside a loop.

The printed definition takes x_{g+1}^(0) as the place where the next group begins. With a noisy start that is noise, so
the ratio is large whatever was learned; and where groups touch, the next group's *input* is x_g^(K) itself, so that
reading is zero. `settled` (where the next group ends) can be wrong in both directions: lead with it.
"""

import torch
from torch import Tensor

from twoscale.geometry.steps import Steps, _checked, _ratio_or_nan, length

LEADING = "settled_k1"
WHAT = {
    "initial": "to the next group's start state (as printed; noise under start=noise)",
    "projected": "to the next group's projected start A [x; e]",
    "first": "to the next group's state after one step",
    "settled": "to the next group's last state",
    "input": "to the next group's input (zero where the groups touch)",
}


def drift_to_loop(
    states: Tensor | Steps, next_states: Tensor, projected: Tensor | None = None, next_input: Tensor | None = None
) -> dict[str, Tensor]:
    """||y - x_g^(K)|| / mean_k ||D_g^(k)|| for each token (...), in every variant.

    `states` and `next_states` are (K+1, ..., C) of a group and the next; `projected` and `next_input` (..., C) belong to the
    next one. A plain name has the mean over all steps below the line; NAME_k1 leaves out the step that leaves the noise
    (k >= 1; NaN with a single step). A group that never moves has no ratio: NaN.
    """
    of = states if isinstance(states, Steps) else Steps(states)
    next_states, norms, last = _checked(next_states), of.norms, of.states[-1]
    below = {"": norms.mean(dim=0), "_k1": norms[1:].mean(dim=0) if len(norms) > 1 else torch.full_like(norms[0], torch.nan)}
    ends = {"initial": next_states[0], "projected": projected, "first": next_states[1], "settled": next_states[-1], "input": next_input}
    ratios: dict[str, Tensor] = {}
    for name, end in ends.items():
        if end is not None:
            drift = length(end.to(last) - last)
            ratios |= {name + suffix: _ratio_or_nan(drift, mean) for suffix, mean in below.items()}
    return ratios
