"""twoscale.generate and its command: cached decoding of ragged batches, sampling, memory, and input that makes no sense."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine, nano_run, small_model
from forked import run_script
from models import loud
from twoscale import UserError, exits
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.kernels.library import c_library
from twoscale.engine.request import LoopParams
from twoscale.train import start_run

PROMPTS = [[1, 2, 3], [4, 5], [7] * 9, [60]]


@pytest.mark.parametrize("rule", [None, exits.Acceleration(3.0), exits.KL(0.05), exits.KL(0.05, read="coda")], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy(rule: exits.Rule | None, kernels: str) -> None:
    """Greedy tokens and their steps are those of a parallel pass over the finished text; a text is the same alone."""
    model = loud(small_model(), scale=0.1)
    gen = twoscale.generate(model, PROMPTS, 12, exit=rule, loops=9, kernels=kernels)
    for i, prompt in enumerate(PROMPTS):
        full = twoscale.forward(model, [prompt + gen.tokens[i]], exit=rule, loops=9)
        n = len(prompt)
        assert full.logits[0, n - 1 : -1].argmax(-1).tolist() == gen.tokens[i]
        assert [tuple(s) for s in full.steps[0, n - 1 : -1].tolist()] == gen.steps[i]
        assert [tuple(s) for s in full.steps[0, :n].tolist()] == gen.prompt_steps[i]
        alone = twoscale.generate(model, [prompt], 12, exit=rule, loops=9, kernels=kernels)
        assert (alone.tokens[0], alone.steps[0]) == (gen.tokens[i], gen.steps[i])
    every = [s for i in range(4) for s in gen.prompt_steps[i] + gen.steps[i][1:]]
    assert gen.work == [sum(s[g] for s in every) for g in range(2)], "work is the sum of steps"


def test_kernels_agree() -> None:
    """C kernels, packed and plain operators write the same text."""
    model = loud(small_model(n_embd=64, positions="rotary", n_kv_head=2, mlp="gated", qk_bias=True), scale=0.1)
    texts = [twoscale.generate(model, PROMPTS, 20, loops=5, kernels=kernels).tokens for kernels in ("auto", "packed", "torch")]
    assert texts[0] == texts[1] == texts[2]


def test_packed_weights() -> None:
    """At a width where packing pays, packed and plain operators agree, for one row and for several."""
    model = loud(small_model(n_embd=512, n_head=8, n_layer=3, groups=((1,),)), scale=0.02)
    outs = [twoscale.forward(model, [[1, 2, 3, 4], [5]], exit=exits.Fixed(3)).logits]
    outs += [torch.tensor(twoscale.generate(model, [[1, 2, 3, 4], [5]], 6, kernels=k).tokens) for k in ("packed", "torch", "auto")]
    assert torch.equal(outs[1], outs[2]) and torch.equal(outs[2], outs[3])
    assert torch.allclose(outs[0], twoscale.forward(model, [[1, 2, 3, 4], [5]], loops=3).logits, atol=1e-4)


def test_a_row_to_the_bit() -> None:
    """With the C kernels, a row's tokens' states do not depend on the rows beside it, to the bit."""
    if c_library() is None:
        pytest.skip("no C compiler on this machine")
    from twoscale.engine import Engine, loop_params

    model = loud(small_model())
    engine, params = Engine(model), loop_params(model, loops=6)
    crowd, alone = [engine.new_cache(4, params) for _ in range(7)], engine.new_cache(4, params)
    for token in (5, 9, 2, 33):
        x, _ = engine.run([(b, cache, [token if b == 3 else b]) for b, cache in enumerate(crowd)])
        y, _ = engine.run([(0, alone, [token])])
        assert torch.equal(x[3], y[0])


def test_without_a_compiler(tmp_path: Path) -> None:
    """Where there is no compiler, or the kernels are turned off, the same text is written by torch's operators."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import twoscale\nfrom models import loud, small_model\n"
        "from twoscale.engine.kernels.library import c_library\n"
        "print(c_library() is None, twoscale.generate(loud(small_model()), [[1, 2, 3]], 8).tokens)\n"
    )
    here = str(Path(__file__).parent)
    said = {}
    for name, env in {"there": {}, "off": {"TWOSCALE_NATIVE": "0"}, "none": {"CC": "/nowhere/cc"}}.items():
        said[name] = run_script(script, here, XDG_CACHE_HOME=str(tmp_path / name), **env).split(" ", 1)
    assert said["off"][0] == said["none"][0] == "True"
    assert said["there"][1] == said["off"][1] == said["none"][1]


def test_stop_and_callback() -> None:
    """A stop token ends its text alone and is its last token; the callback hears every token in order."""
    model = loud(small_model())
    free = twoscale.generate(model, PROMPTS, 10, loops=4)
    stop = free.tokens[0][2]
    calls: list[tuple[int, int, tuple[int, ...]]] = []
    gen = twoscale.generate(model, PROMPTS, 10, loops=4, stop=[stop], callback=lambda *event: calls.append(event))
    for row, whole in enumerate(free.tokens):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert gen.tokens[row] == cut and gen.finish_reasons[row] == ("stop" if stop in whole else "length")
        assert [t for r, t, _ in calls if r == row] == cut
    assert [s for r, _, s in calls if r == 1] == gen.steps[1]


def test_sampling() -> None:
    """Draws repeat with their seed and do not depend on the batch; equal prompts draw differently."""
    model = loud(small_model())
    a, b, c = (twoscale.generate(model, [[1, 2]] * 3, 8, temperature=1.0, seed=s).tokens for s in (0, 0, 1))
    assert a == b != c and len({tuple(t) for t in a}) == 3
    assert twoscale.generate(model, [[9], [1, 2]], 8, temperature=1.0).tokens[1] == a[0], "the same beside another text"


def test_cache_bytes() -> None:
    """kv="last" holds what a plain GPT holds; "exact" at most one level a step that was taken; ring:n n of them."""
    config = small_model()
    plain = config.n_layer * 2 * 32 * 4  # keys and values, fp32

    def params(kv: str) -> LoopParams:
        return LoopParams((None, None), (9, 9), kv)

    assert bytes_per_token(config, params("last")) <= 1.05 * plain
    assert bytes_per_token(config, params("ring:4")) == plain // 5 * (2 + 3 * 4)
    assert bytes_per_token(config, params("exact")) == plain // 5 * (2 + 3 * 9)
    model = loud(config)
    held = {kv: twoscale.generate(model, [[1, 2, 3]], 20, loops=9, kv=kv).cache_bytes for kv in ("last", "ring:4", "exact")}
    assert held["last"] == plain * 22 and held["ring:4"] == bytes_per_token(config, params("ring:4")) * 22
    early = twoscale.generate(model, [[1, 2, 3]], 20, loops=9, exit=exits.Fixed(2)).cache_bytes
    assert early < held["exact"] / 3, "levels that nobody has reached do not exist"


MEMORY = """
import sys, gc; sys.path.insert(0, sys.argv[1])
import torch, twoscale
from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT
torch.set_num_threads(2)
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096
model = LoopedGPT(ModelConfig(vocab_size=512, block_size=512, n_layer=6, n_head=4, n_embd=256, groups=((1, 2), (3, 4)))).eval()
twoscale.generate(model, [[1] * 100], 50, loops=10, kv=sys.argv[2])
heard, marks = [], []
def mark(row, token, steps):
    heard.append(token)
    if len(heard) in (1, 401):
        marks.append(resident())
gen = twoscale.generate(model, [[1] * 100], 401, loops=10, kv=sys.argv[2], callback=mark)
print(marks[1] - marks[0], gen.cache_bytes)
"""


@pytest.mark.parametrize("kv", ["last", "exact"])
def test_memory_is_the_cache(kv: str) -> None:
    """Over 400 tokens the process grows by no more than its keys and values, and a little."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    command = [sys.executable, "-c", MEMORY, str(Path(__file__).parent), kv]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, held = map(int, result.stdout.split())
    assert grown <= 1.05 * held + 4e6, f"grew by {grown / 1e6:.1f} MB, keys and values are {held / 1e6:.1f} MB"


BAD = [
    (lambda m: twoscale.generate(m, [[1, 64]], 4), "token 64 does not exist"),
    (lambda m: twoscale.generate(m, [[1, -1]], 4), "token -1 does not exist"),
    (lambda m: twoscale.generate(m, [[]], 4), "empty"),
    (lambda m: twoscale.generate(m, [], 4), "no sequence"),
    (lambda m: twoscale.generate(m, [["a"]], 4), "integers"),
    (lambda m: twoscale.generate(m, [[1] * 33], 4), "33 tokens"),
    (lambda m: twoscale.generate(m, [[1] * 30], 4), "at most 3 new ones"),
    (lambda m: twoscale.generate(m, [[1]], 0), "max_new_tokens = 0"),
    (lambda m: twoscale.generate(m, [[1]], 4, loops=0), "loops = 0"),
    (lambda m: twoscale.generate(m, [[1]], 4, loops=(1, 2, 3)), "one for each"),
    (lambda m: twoscale.generate(m, [[1]], 4, kv="first"), "kv = 'first'"),
    (lambda m: twoscale.generate(m, [[1]], 4, kv=3), "kv = 3"),
    (lambda m: twoscale.generate(m, [[1]], 4, kernels="fast"), "kernels = 'fast'"),
    (lambda m: twoscale.generate(m, [[1]], 4, temperature=math.nan), "temperature = nan"),
    (lambda m: twoscale.generate(m, [[1]], 4, temperature=1.0, top_k=0), "top_k = 0"),
    (lambda m: twoscale.generate(m, [[1]], 4, temperature=1.0, top_p=0.0), "top_p = 0"),
    (lambda m: twoscale.generate(m, [[1]], 4, seed=0.5), "seed = 0.5"),
    (lambda m: twoscale.generate(m, [[1]], 4, exit={5: exits.Fixed(2)}), "group 5"),
    (lambda m: twoscale.generate(m, [[1]], 4, exit=exits.Gate(0.5)), "learned gate"),
    (lambda m: twoscale.generate(m, [[1]], 4, exit=exits.Oracle(torch.ones(1, 1, dtype=torch.int64))), "labels"),
    (lambda m: twoscale.forward(m, [[1]], exit={-1: exits.Fixed(2)}), "group -1"),
    (lambda m: twoscale.forward(m, [[1]], exit="speed"), "no exit rule"),
    (lambda m: twoscale.forward(m, [[1] * 33], exit=exits.Fixed(2)), "33 tokens"),
]


@pytest.mark.parametrize(("call", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input(call, words: str) -> None:  # type: ignore[no-untyped-def]
    """What makes no sense is refused in one clear line."""
    with pytest.raises(UserError) as error:
        call(loud(small_model()))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_nan_weights(kernels: str) -> None:
    """NaN in any weight is said, by forward and by generate, with and without a rule."""
    for name in ("wte.weight", "stages.1.blocks.0.mlp.up.weight", "stages.2.adapter.weight", "stages.0.blocks.0.norm1.weight"):
        model = loud(small_model())
        with torch.no_grad():
            model.get_parameter(name)[1] = math.nan
        for call in (
            lambda m: twoscale.forward(m, [[1, 2]]),
            lambda m: twoscale.forward(m, [[1, 2]], exit=exits.Acceleration(1.0)),
            lambda m: twoscale.generate(m, [[1, 2]], 3, exit=exits.StepNorm(1.0), kernels=kernels),
        ):
            with pytest.raises(UserError, match="not finite"):
                call(model)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    start_run(nano_run(steps=4), folder, shards)
    return folder


def test_command(run: Path, cli: CommandLine) -> None:
    """`twoscale generate` prints prompt and text on stdout, figures on stderr, and colours only when asked."""
    code, out, err = cli("generate", run, "The loop", "--max-new-tokens", 20, "--exit", "acceleration:0.5", "--loops", 6)
    assert code == 0 and out.startswith("The loop") and "\x1b" not in out
    assert "tokens in" in err and "loop work than the default of 3 loops" in err
    code, colored, err = cli(
        "generate", run, "The loop", "--max-new-tokens", 20, "--exit", "acceleration:0.5", "--loops", 6, "--color", "always"
    )
    assert code == 0 and "\x1b[38;5;" in colored and "mean over groups" in err
    code, again, _ = cli("generate", run, "The loop", "--max-new-tokens", 20, "--exit", "acceleration:0.5", "--loops", 6)
    assert again == out
    assert cli("generate", run, "a" * 60)[0] == 0, "without a number, as many tokens as the context has room for"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a" * 10_000,), "10000 tokens"),
        (("",), "empty"),
        (("a", "--max-new-tokens", 0), "max_new_tokens = 0"),
        (("a", "--max-new-tokens", 999), "at most 64 new ones"),
        (("a", "--exit", "speed:1"), "no exit rule 'speed'"),
        (("a", "--exit", "acceleration:-1"), "tau = -1"),
        (("a", "--loops", 0), "loops = 0"),
        (("a", "--loops", 1, 2, 3), "one for each"),
        (("a", "--kv", "ring:x"), "kv = 'ring:x'"),
        (("a", "--temperature", "hot"), "hot"),
    ],
    ids=str,
)
def test_bad_commands(words: tuple[object, ...], said: str, run: Path, cli: CommandLine) -> None:
    """A command that makes no sense is one line, exit code 2, and nothing on stdout."""
    code, out, err = cli("generate", run, *words)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1 and not out
