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
        "What decides: loss against cost, every rule beside fixed depths, random exits with the mean steps of a rule, and two "
        "oracles that see the labels: the first with one depth for all groups, the second with any depth of a table of some forty. Both as "
        "run, where tokens also see their neighbours at other depths. Circled: no other setting that can be had is better in both. "
        "FLOPs and times include a rule's own looks; a random exit's time includes drawing its depths.",
    ),
    "steps_taken": (
        "Steps taken",
        "How many steps the tokens take in each group, each rule at its cheapest threshold that keeps CE within 0.01 nats by its "
        "whole interval; where none does, at the one with the smallest rise.",
    ),
    "hard_tokens": (
        "Which tokens take longest",
        "Mean steps (over groups) against the token's own loss in the full run, and the tokens with the most and the fewest steps among "
        "those that occur often. A flat line means that steps have nothing to do with how hard the next token is to tell.",
    ),
}

STYLE = """
:root {
  color-scheme: light dark; --ink: #1d2733; --soft: #5b6775; --line: #dde3ea; --card: #ffffff; --page: #f5f7fa; --link: #005a8d;
  --good: #00664b; --bad: #a33d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e9ee; --soft: #9aa7b4; --line: #33404d; --card: #182129; --page: #10171d; --link: #6cb8e6;
    --good: #4cc9a0; --bad: #ff9c66;
  }
}
* { box-sizing: border-box; } body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 60px; } h1 { margin: 0 0 4px; font-size: 1.7rem; }
h2 { margin: 40px 0 6px; font-size: 1.25rem; } h3 { margin: 8px 0 0; font-size: .95rem; color: var(--soft); font-weight: 600; }
p { max-width: 78ch; } .soft { color: var(--soft); } 
.panels { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px; min-width: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; background: var(--card); }
th, td { border: 1px solid var(--line); padding: 5px 9px; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.confirmed { color: var(--good); } .refuted { color: var(--bad); } .undecided { color: var(--soft); }
.outcome { font-weight: 700; white-space: nowrap; } .advice { font-size: 1.08rem; font-weight: 600; }
summary { cursor: pointer; margin: 14px 0 6px; color: var(--soft); font-weight: 600; }
details { margin: 10px 0; } 
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); padding: 10px; font-size: .82rem; }
a { color: var(--link); } code { font-size: .92em; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.8; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px 14px; margin: 10px 0; max-width: 84ch; }
.sample .tok { border-radius: 3px; padding: 2px 0; } .sample .given { color: var(--soft); }
.ramp { display: inline-block; width: 120px; height: 11px; border-radius: 3px; margin: 0 8px; vertical-align: -1px; }
h1:not(:first-child) { margin-top: 72px; border-top: 2px solid var(--line); padding-top: 28px; }
.plot { width: 100%; overflow: hidden; }
@media (max-width: 700px) {
  .claims, .claims tbody, .claims tr, .claims td { display: block; width: 100%; } .claims th { display: none; }
  .claims tr { border: 1px solid var(--line); margin-bottom: 10px; } .claims td { border: 0; }
}
"""

DRAW = """
const lighter = {'#000000': '#ffffff', '#440154': '#a374cf', '#414487': '#8088dd'};  // what would be lost on a dark page
const dark = matchMedia('(prefers-color-scheme: dark)');
const draw = () => {
  const look = getComputedStyle(document.documentElement), pick = (name) => look.getPropertyValue(name).trim();
  for (const source of document.querySelectorAll('script[data-for]')) {
    const text = dark.matches ? source.textContent.replace(/#(000000|440154|414487)/g, (c) => lighter[c]) : source.textContent;
    const figure = JSON.parse(text), layout = figure.layout;
    Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)'});
    layout.font = {...layout.font, color: pick('--ink')};
    for (const axes of [layout, layout.scene || {}])
      for (const key of [...Object.keys(axes), ...(axes === layout ? ['xaxis', 'yaxis'] : ['xaxis', 'yaxis', 'zaxis'])])
        if (/^[xyz]axis[0-9]*$/.test(key) && (axes === layout || layout.scene))
          axes[key] = {...axes[key], gridcolor: pick('--line'), zerolinecolor: pick('--line'), linecolor: pick('--soft')};
    Plotly.react(source.dataset.for, figure.data, layout, {responsive: true, displayModeBar: false});
  }
};
draw();
dark.addEventListener('change', draw);
"""
