"""Words and looks of the page: headings, captions, style sheet."""

# name of a figure -> (heading, caption)
CAPTIONS: dict[str, tuple[str, str]] = {
    "step_norms": (
        "Step norms",
        "How far the state moves at each loop step: mean over tokens with a one-sigma band, one line a checkpoint.",
    ),
    "step_cosines": (
        "Step cosines",
        "The angle between a step and the one before. +1: straight on; 0: at a right angle (less collinear, not yet "
        "orthogonal, in between); −1: back and forth. Steps below 1e-6 of the state are rounding and are not counted.",
    ),
    "accelerations": (
        "Accelerations",
        "How much a step differs from the one before, in three forms. Under plain contraction by c the last form is the"
        " constant |1 − c| / (1 + |c|): it never falls, and for an alternating approach it is stuck at 1.",
    ),
    "drift_to_loop": (
        "Drift-to-Loop Ratio",
        "The way from one group to the next beside a mean step inside the first. The printed reading (`initial`) ends "
        "at the next group's start state, which is noise here, so it is large whatever was learned; where groups touch,"
        " the reading by the next group's input is 0 by construction. `settled`, with the step that leaves the noise "
        "left out (k ≥ 1), is the reading that can be wrong, so this report leads with it. The mean step is taken over "
        "all traced steps: trace longer and it shrinks, so compare ratios only at equal loop counts.",
    ),
    "limit": (
        "Distance to the limit",
        "Distance to the state many steps later; a straight line is a steady contraction.",
    ),
    "trajectories": (
        "Trajectories",
        "States of a few tokens in the first three principal components of one sequence, over depth and loop steps.",
    ),
    "verdict_map": (
        "What each token does",
        "Settling: the last step is below 1e-4 of the state, or steps shrink by 1 % a step or more. Drifting: they grow"
        " by 1 %, or keep length and direction. Circling: they keep their length and turn.",
    ),
    "against_tau": (
        "Time and quality against the threshold",
        "The paper's three panels. Time: one sequence, cached decoding, the rules taking turns token by token on the same text. A "
        "threshold is an absolute number, so where a curve bends depends on the size of a model's states.",
    ),
    "tradeoff": (
        "The trade-off",
        "What decides: loss against cost, every rule beside fixed depths, random exits with the mean steps of acceleration, and two "
        "oracles that see the labels: the first with one depth for all groups, the second with any depth of a table of some forty. Both as "
        "run, where tokens also see their neighbours at other depths. Circled: no other setting that can be had is better in both. "
        "FLOPs and times include a rule's own looks; a random exit's time includes drawing its depths.",
    ),
    "steps_taken": (
        "Steps taken",
        "How many steps the tokens take in each group, each rule at its cheapest threshold that keeps CE within 0.01 nats.",
    ),
    "hard_tokens": (
        "Which tokens take longest",
        "Mean steps (over groups) against the token's own loss in the full run, and the tokens with the most and the fewest steps among "
        "those that occur often. A flat line means that steps have nothing to do with how hard the next token is to tell.",
    ),
}

STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5b6775; --line: #dde3ea; --card: #ffffff; --page: #f5f7fa; }
* { box-sizing: border-box; } body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 60px; } h1 { margin: 0 0 4px; font-size: 1.7rem; }
h2 { margin: 40px 0 6px; font-size: 1.25rem; } h3 { margin: 8px 0 0; font-size: .95rem; color: var(--soft); font-weight: 600; }
p { max-width: 78ch; } .soft { color: var(--soft); } 
.panels { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px; min-width: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; background: var(--card); }
th, td { border: 1px solid var(--line); padding: 5px 9px; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.confirmed { color: #00664b; } .refuted { color: #a33d00; } .undecided { color: #5b6775; }
.outcome { font-weight: 700; white-space: nowrap; } .advice { font-size: 1.08rem; font-weight: 600; }
summary { cursor: pointer; margin: 14px 0 6px; color: var(--soft); font-weight: 600; }
details { margin: 10px 0; } 
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); padding: 10px; font-size: .82rem; }
a { color: #005a8d; }
.plot { width: 100%; overflow: hidden; }
@media (max-width: 700px) {
  .claims, .claims tbody, .claims tr, .claims td { display: block; width: 100%; } .claims th { display: none; }
  .claims tr { border: 1px solid var(--line); margin-bottom: 10px; } .claims td { border: 0; }
}
"""

DRAW = """
for (const source of document.querySelectorAll('script[data-for]')) {
  const figure = JSON.parse(source.textContent);
  Plotly.newPlot(source.dataset.for, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}
"""
