"""The depth that vLLM runs a folder at, and what is refused before vLLM is started. Needs no vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import CommandLine, is_one_line
from models import small_model
from twoscale import exits
from twoscale.config import UserError
from twoscale.config.files import write_json
from twoscale.config.serial import to_dict
from twoscale.interop import find, vllm_plugin
from twoscale.interop.export import export
from twoscale.interop.load import model_config
from twoscale.interop.vllm_plugin.depth import check_depth, fixed_depth
from twoscale.tradeoff.load_run import name_checkpoint

CONFIG = small_model(groups=((0,), (1, 2), (4,)), mean_loops=7)


def folder_with(tmp_path: Path, fixed: str | None, weights: str | None = None) -> Path:
    """A folder whose calibration has certified that fixed depth."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    report = {"fixed": {"rule": fixed, "ce": 1.0}}
    about = name_checkpoint(tmp_path) if weights is None else {"checkpoint": "x", "weights": weights}
    write_json(tmp_path / "calibration.json", {**about, "rules": ["acceleration:0.5"] * 3, "loops": 20, "report": report})
    return tmp_path


def test_depth_of_a_folder(tmp_path: Path) -> None:
    """Loops are those that are asked for, else the best fixed depth of the calibration, else the model's own; `auto` has its rules."""
    folder = folder_with(tmp_path, "fixed:4")
    assert check_depth(CONFIG, None).loops == (7, 7, 7) and check_depth(CONFIG, folder).loops == (4, 4, 4)
    assert check_depth(CONFIG, folder, loops=[1, 2, 3]).loops == (1, 2, 3) and check_depth(CONFIG, folder, loops=9).loops == (9, 9, 9)
    auto = check_depth(CONFIG, folder, exit="auto")
    assert auto.loops == (20, 20, 20) and auto.rules == (exits.Acceleration(0.5),) * 3
    mixed = check_depth(CONFIG, folder, exit=["fixed:2", None, "step-norm:0.1"], loops=5)
    assert mixed.rules == (exits.Fixed(2), None, exits.StepNorm(0.1)) and mixed.loops == (5, 5, 5)
    assert check_depth(CONFIG, None, seed=3).seed == 3


def test_depth_of_an_export(tmp_path: Path) -> None:
    """An export of the bundled model runs at the fixed depth that its calibration has certified; `auto` takes its rules along."""
    folder = export(find("bundled"), tmp_path / "export")
    config = model_config(folder)
    rule = exits.parse(json.loads((folder / "calibration.json").read_text())["report"]["fixed"]["rule"])
    assert isinstance(rule, exits.Fixed)
    assert check_depth(config, folder).loops == (rule.k,) * config.n_groups and rule.k != config.mean_loops
    assert all(isinstance(r, exits.Acceleration) for r in check_depth(config, folder, exit="auto").rules)


def test_calibration_of_other_weights(tmp_path: Path) -> None:
    """A calibration of other weights, or without a certified fixed depth, says nothing."""
    assert fixed_depth(folder_with(tmp_path, "fixed:4", weights="other")) is None
    assert fixed_depth(folder_with(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"loops": [1, 2]}, "loops has 2 entries, the model has 3 groups"),
        ({"loops": 0}, "at least 1"),
        ({"loops": 10_001}, "at most 10000 steps"),
        ({"loops": "many"}, "one integer"),
        ({"exit": "kl:0.1"}, "KL of group 0 does not run in vLLM"),
        ({"exit": ["fixed:2"]}, "exit has 1 rules, the model has 3 groups"),
        ({"exit": 3}, "exit = 3"),
        ({"exit": "gate:0.5"}, "no learned gate"),
        ({"exit": "auto"}, "give its path"),
        ({"seed": 0.5}, "start_seed = 0.5"),
    ],
)
def test_bad_depths(settings: dict[str, Any], line: str) -> None:
    """A depth that the folder cannot do is one line that says why."""
    with pytest.raises(UserError, match=line) as caught:
        check_depth(CONFIG, None, **settings)
    assert "\n" not in str(caught.value)


def exported(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "twoscale", "twoscale": to_dict(CONFIG)})
    return tmp_path


@pytest.mark.parametrize(
    ("version", "words", "line"),
    [
        (None, (), "vLLM is not installed"),
        ("0.31.2", (), "vLLM 0.31.2 is installed, the plugin supports 0.32"),
        ("0.32.1+cpu", ("--hf-overrides", '{"loops": [1]}'), "loops has 1 entries, the model has 3 groups"),
        ("0.32.0", ("--hf-overrides", "{"), "--hf-overrides is not valid JSON"),
        ("0.32.0", ("--policy", "depth"), "--policy does not go with --engine vllm"),
    ],
)
def test_bad_command(
    version: str | None, words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """`twoscale serve --engine vllm` without vLLM, with another version of it, or at an impossible depth: one line and code 2."""
    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: version)
    code, _, err = cli("serve", exported(tmp_path), "--engine", "vllm", "--port", "0", *words)
    assert code == 2 and line in err and is_one_line(err)


def test_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """A port in use is told before vLLM is started."""
    local = pytest.importorskip("twoscale.serve.local", reason="the extra twoscale[serve] is not installed")
    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: "0.32.0")
    with local.listen("127.0.0.1", 0) as taken:
        code, _, err = cli("serve", exported(tmp_path), "--engine", "vllm", "--port", taken.getsockname()[1])
    assert code == 2 and "cannot listen on" in err and is_one_line(err)


def test_register_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In another version of vLLM the plugin says so in one line and registers nothing; vLLM goes on with its own models."""
    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: "0.27.0")
    vllm_plugin.register()
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "supports 0.32" in caplog.text


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names folder, address, precision and the overrides as JSON."""
    from twoscale.serve.vllm_engine import vllm_command

    monkeypatch.setattr(vllm_plugin, "installed_vllm", lambda: "0.32.0")
    words = vllm_command(exported(tmp_path), "m", "127.0.0.1", 8001, {"loops": [1, 2, 3]})
    assert words[words.index("--model") + 1] == str(tmp_path) and words[words.index("--port") + 1] == "8001"
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"loops": [1, 2, 3]} and "--enforce-eager" in words
