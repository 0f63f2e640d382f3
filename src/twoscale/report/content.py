"""Words and looks of the page that belong to no figure: glossary, style sheet (page.css), the script that draws (page.js)."""

from pathlib import Path

_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "page.css").read_text("utf-8")
DRAW = (_FOLDER / "page.js").read_text("utf-8")

PAPER = "“Two-Scale Latent Dynamics for Recurrent-Depth Transformers” (Pappone, Crisostomi, Rodolà, 2025)"

# word -> what it means on the page; the second list is for pages with a sweep, {units} is what their intervals are over
GLOSSARY: tuple[tuple[str, str], ...] = (
    ("the paper", f"{PAPER}. Claims (a) to (g) are its claims, each judged here by a stated rule on this run."),
    (
        "loop group, loop, step k",
        "A loop group is a run of layers that is applied again and again to a token's state before the next layers follow. One application "
        "is a loop, or loop step; k counts steps from 0. By default a group starts from noise. Groups are counted from 1, layers from 0.",
    ),
    (
        "r, default depth",
        "How many loops a group takes if nothing is asked (`mean_loops`). Training draws its own number about it, or about fewer while the "
        "number of loops grows (`loops_ramp`, `loops_hold`).",
    ),
    (
        "CE, nats, PPL",
        "Cross-entropy: the mean loss of a token, in nats (natural logarithm; 1 nat is 1.44 bits). PPL, perplexity, is exp(CE). Bits per "
        "byte divide the loss by the bytes of the text, so that models with different tokens can be compared on one text.",
    ),
    (
        "bundled; nano, tiny, small, paper",
        "The small model that comes with the package; presets of the command line, after which runs are called.",
    ),
    (
        "bigram",
        "A model that knows only the token before: its loss on the same text, counted on the training text, is what any model should beat.",
    ),
    ("DLR", "Drift-to-Loop Ratio; its readings are explained at the figure."),
    (
        "contraction rate, spectral radius",
        "By what factor a step shrinks from one loop to the next (fitted to the step norms), and the largest such factor at the limit "
        "state, over a few sequences. Below 1 the loop converges.",
    ),
    (
        "Muon, AdamW",
        "Optimizers. Muon orthogonalises the momentum of each weight matrix; it shapes the geometry, so the "
        "printed figures of the geometry name it.",
    ),
    ("builtin", "Text that needs no download: the language reference and the docstrings that ship with Python."),
    (
        "held-out text and its parts",
        "Documents that a run was not trained on. For sweeps and calibrations they are dealt into a fit, a certify and a report part, "
        "which share no document (where there are fewer than 12 documents: no window).",
    ),
)
SWEPT_GLOSSARY: tuple[tuple[str, str], ...] = (
    ("full run", "Every group takes all loops that the sweep allows. Losses are compared with it."),
    (
        "dCE",
        "CE minus that of the full run on the same tokens, in nats a token; in brackets its 95 % interval over {units}.",
    ),
    (
        "exit rule, tau",
        "Decides after each loop step, token by token and group by group, whether the token leaves the loop; tau is its threshold.",
    ),
    (
        "fixed:4, step-norm:1.0, kl:0.1, acceleration:0.01",
        "A setting: the rule's name and its threshold. `fixed:4` takes 4 loops in every group for every token. `step-norm` leaves when "
        "the step is shorter than tau, `kl` when the predicted distribution changes by less than tau, `acceleration` when two differences "
        "of consecutive steps in a row are shorter than tau.",
    ),
    (
        "learned:0.3, learned controller",
        "A small head for each group, trained for this model after its training: a logistic one on the lengths of steps and the angle "
        "between them, or one with a hidden layer on the state. It says how likely it is that more steps lower the token's loss; a token "
        "leaves when that is below tau (docs/exits.md, docs/tradeoff.md).",
    ),
    ("calibrated", "One threshold for each group, found by `twoscale calibrate`."),
    (
        "certified",
        "A setting that passed a test on text of its own (the certify part): its dCE lies below the limit with the confidence that is "
        "stated beside it. Settings are tested from most steps to fewest until one fails, so the confidence does not suffer from how many "
        "are tested.",
    ),
    ("random, oracle", "Baselines: depths drawn at random with the mean steps of a rule; depths chosen with the labels in hand."),
    ("steps", "Loop steps that a token takes, mean over tokens and groups (each group counts the same, whatever its number of layers)."),
    (
        "looks",
        "What a rule computes to decide. Rules on the prediction, as `kl`, read the final norm and the head after each step; `learned` "
        "computes its own small head; rules on states, as `step-norm` and `acceleration`, compare states.",
    ),
    (
        "ms a token",
        "Time of cached decoding, one sequence, a few tokens in each round of timing, relative to the full run: the setting's time divided "
        "by the full run's among the settings that were timed together, in the same rounds of timing, times the full run's median. In "
        "brackets a 95 % interval over rounds; the full run has none, since all times are relative to it.",
    ),
    ("agreement", "How often the most likely next token is that of the full run."),
    (
        "Pareto front",
        "Settings for which no cheaper one (by `flops` or by `ms`), oracles aside, has as low a CE; losses that differ by less than half "
        "of the last printed digit count as equal.",
    ),
)
DEPTH_GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "true depth",
        "How many steps an answer of the task takes by its definition: hops of a query, or the length of a carry chain plus one.",
    ),
    (
        "D@-0.5",
        "Mean steps of the answers at a rule's certified setting: the one with the fewest steps whose accuracy is certified to lie at most "
        "half a point below that of all loops.",
    ),
    (
        "rank correlation",
        "Spearman's, of the steps that answers take and their true depth: 1 where deeper answers always take more steps, 0 where the two "
        "have nothing to do with each other.",
    ),
    ("best fixed depth", "The fewest steps, the same for every token, that are certified in the same way."),
    ("true depths", "An oracle: every answer takes its true depth, every other token all loops."),
    (
        "answers alone",
        "Only the answers leave by the rule; every other token takes all loops. It tells whether a rule fails at the answers or because it "
        "stops tokens that they read.",
    ),
    ("one hit, two hits", "How many steps in a row must pass a rule's test before a token leaves."),
)

LIGHT = (
    "--ink: #1d2733; --soft: #5b6775; --line: #dde3ea; --card: #ffffff; --page: #f5f7fa; --link: #005a8d; --good: #00664b; --bad: #a33d00;"
)
DARK = (
    "--ink: #e4e9ee; --soft: #9aa7b4; --line: #33404d; --card: #182129; --page: #10171d; --link: #6cb8e6; --good: #4cc9a0; --bad: #ff9c66;"
)


def style_sheet(dark: bool | None) -> str:
    """The page's CSS, light, dark, or (None) as the reader's system asks."""
    if dark is None:
        return f":root {{ color-scheme: light dark; {LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{STYLE}"
    return f":root {{ color-scheme: {'dark' if dark else 'light'}; {DARK if dark else LIGHT} }}\n{STYLE}"


def draw_script(dark: bool | None) -> str:
    """The script that draws the plots in the page's colours, and again when the reader's system changes them."""
    asked = "matchMedia('(prefers-color-scheme: dark)')"
    return DRAW.replace(asked, asked if dark is None else f"{{matches: {str(dark).lower()}, addEventListener() {{}}}}")
