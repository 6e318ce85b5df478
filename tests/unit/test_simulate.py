from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from halfscale.cli import app
from halfscale.policies import POLICIES, make_policy
from halfscale.simulate import parse_pattern, parse_settings, short, simulate

WORDS = ["simulate"]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*WORDS, *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_one_policy_prints_the_scales_on_one_line() -> None:
    settings = ["init_scale=64", "growth_interval=3", "hysteresis=2"]
    options = [part for setting in settings for part in ("--set", setting)]
    code, out, _ = run("--policy", "megatron", *options, "--pattern", "FFXFFXFFX")
    # Two isolated overflows use up the hysteresis, the third backs off again.
    assert (code, out) == (0, "64 64 64 64 64 32 32 32 16\n")


def test_several_policies_stand_side_by_side() -> None:
    options = ["--policy", "torch", "--policy", "flax", "--set", "growth_interval=2"]
    code, out, _ = run(*options, "--set", "flax.init_scale=1", "--pattern", "FFF")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows == [
        ["step", "torch", "flax"],
        ["0", "F", "65536", "1"],
        ["1", "F", "131072", "1"],
        ["2", "F", "131072", "2"],
    ]


def test_json_gives_the_whole_state() -> None:
    _, out, _ = run("--policy", "torch", "--json", "--pattern", "FX")
    states = json.loads(out)["torch"]["states"]
    assert states == [{"scale": 65536.0, "tracker": 1}, {"scale": 32768.0, "tracker": 0}]


def test_a_policy_that_gives_up_says_where() -> None:
    code, out, err = run("--policy", "fairseq", "--pattern", "X" * 40)
    assert code == 0
    assert len(out.split()) == 28
    assert "step 28" in err and "0.0001" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "torch", "--pattern", "FFA"], "'A'"),
        (["--policy", "torch", "--pattern", ""], "empty"),
        (["--policy", "torch"], "--pattern"),
        (["--policy", "tor", "--pattern", "F"], "torch, static"),
        (["--policy", "keras", "--set", "growth_factor=3", "--pattern", "F"], "growth_interval"),
        (["--policy", "keras", "--set", "init_scale", "--pattern", "F"], "key=value"),
        (["--policy", "keras", "--set", "jmp.factor=3", "--pattern", "F"], "'jmp'"),
        (["--policy", "torch", "--set", "init_scale=big", "--pattern", "F"], "number"),
        (["--policy", "openseq2seq-logmax", "--pattern", "F"], "largest_gradient"),
    ],
)
def test_an_impossible_request_gets_one_line(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 1
    assert said in err and "Traceback" not in out + err
    assert err.count("\n") == 1


def test_numbers_are_read_as_in_the_configuration() -> None:
    settings = parse_settings(["torch"], ["init_scale=2**8", "growth_interval=1e3"])
    assert settings == {"torch": {"init_scale": 256, "growth_interval": 1000.0}}
    assert make_policy("torch", **settings["torch"]).growth_interval == 1000


@given(st.text("FX", min_size=1, max_size=60), st.sampled_from(sorted(POLICIES)))
def test_simulation_is_the_policy_driven_by_hand(pattern: str, name: str) -> None:
    done = simulate(make_policy(name), parse_pattern(pattern, largest_gradient=0.5))
    policy, scales = make_policy(name), []
    for letter in pattern[: len(done.scales)]:
        scales.append(policy.update(letter == "X", largest_gradient=0.5))
    assert done.scales == scales
    assert (done.ended is None) == (len(scales) == len(pattern))


@given(st.floats(2.0**-100, 2.0**100))
def test_a_short_scale_reads_back_exactly(scale: float) -> None:
    assert float(short(scale)) == scale


def test_a_recorded_run_can_be_replayed(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "overflow": [True, False, False],
        "headroom": [float("-inf"), 3.0, 2.0],
        "scale": [65536.0, 32768.0, 32768.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "trace.parquet")
    _, out, _ = run("--policy", "torch", "--trace", str(tmp_path))
    assert out == "32768 32768 32768\n"
    code, _, _ = run("--policy", "openseq2seq-logmax", "--trace", str(tmp_path / "trace.parquet"))
    assert code == 0


def test_simulating_imports_no_torch() -> None:
    code = (
        "import sys; from halfscale.cli import app\n"
        "try: app(['simulate', '--policy', 'deepspeed', '--pattern', 'FX'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
