"""``halfscale replay --log``: true bounds, the scaler that wrote a log, and logs out of order."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from halfscale.cli import app
from halfscale.logs import bound_skips, bounds, examine, infer, read_log
from halfscale.logs.drive import drive
from halfscale.logs.estimate import Estimate, estimate
from halfscale.logs.log import NONE, OVERFLOW, UNKNOWN, ScalingLog
from halfscale.plan import PolicyChoice
from halfscale.policies import make_policy

from .crafted import Fate, make_plan, write_crafted

law = settings(deadline=None, max_examples=80)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def torch(**parameters: Any) -> PolicyChoice:
    return PolicyChoice.of("torch", **parameters)


def train(choice: PolicyChoice, thresholds: Sequence[float]) -> tuple[list[float], list[bool]]:
    """Scale and overflow of each step, if a step overflows from its threshold on."""
    policy, scales, overflows = choice.make(), [], []
    for threshold in thresholds:
        scales.append(policy.scale)
        overflows.append(policy.scale >= threshold)
        policy.update(overflows[-1])
    return scales, overflows


def log_of(
    scales: Sequence[float], overflows: Sequence[bool | int], first: int = 0, **columns: Any
) -> ScalingLog:
    largest = np.asarray(columns.get("largest", [math.nan] * len(scales)), dtype=np.float64)
    flags = np.array([int(flag) for flag in overflows], dtype=np.int8)
    return ScalingLog(
        Path("run.csv"), first, np.array(scales, dtype=float), flags, largest, len(scales)
    )


def pattern_log(text: str) -> ScalingLog:
    """``16F 16X 8F``: the scale, and whether the step overflowed; ``?`` for a missing row."""
    words = text.split()
    flags = {"F": NONE, "X": OVERFLOW}
    scales = [math.nan if word == "?" else float(word[:-1]) for word in words]
    return log_of(scales, [flags.get(word[-1], UNKNOWN) for word in words])


# --- strategies ---------------------------------------------------------------------------------

factors = st.sampled_from([2.0, 4.0, 1.5, 1.1]) | st.floats(1.01, 8)
choices = st.builds(
    torch,
    init_scale=st.integers(-4, 30).map(lambda power: 2.0**power) | st.floats(0.1, 2.0**20),
    growth_factor=factors,
    backoff_factor=st.sampled_from([0.5, 0.25, 0.75]) | st.floats(0.05, 0.95),
    growth_interval=st.integers(1, 8) | st.sampled_from([20, 2000]),
)
levels = st.integers(-8, 32).map(lambda power: 2.0**power) | st.floats(0.5, 2.0**24)
stretches = st.lists(
    st.tuples(levels | st.sampled_from([0.0, math.inf]), st.integers(1, 25)), max_size=8
)
trainings = stretches.map(lambda parts: [level for level, n in parts for _ in range(n)])


# --- bounds -------------------------------------------------------------------------------------


@law
@given(own=choices, other=choices, thresholds=trainings.filter(bool), data=st.data())
def test_the_true_count_of_any_configuration_lies_within_its_bounds(
    own: PolicyChoice, other: PolicyChoice, thresholds: list[float], data: st.DataObject
) -> None:
    scales, overflows = train(own, thresholds)
    missing = data.draw(st.sets(st.integers(0, len(scales) - 1), max_size=len(scales) // 3))
    flags = [UNKNOWN if i in missing else int(flag) for i, flag in enumerate(overflows)]
    log = log_of([math.nan if i in missing else s for i, s in enumerate(scales)], flags)
    moved, skips = train(other, [*thresholds, math.inf])
    found = bound_skips(other, log)
    assert found.least <= sum(skips[:-1]) <= found.most
    assert found.final_scale[0] <= moved[-1] <= found.final_scale[1]


@law
@given(own=choices, other=choices, thresholds=trainings.filter(bool))
def test_bounds_hold_when_scales_are_taken_together(
    own: PolicyChoice, other: PolicyChoice, thresholds: list[float]
) -> None:
    log = log_of(*train(own, thresholds))
    exact = bound_skips(other, log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MOST_SCALES", 8)
        found = bound_skips(other, log)
    assert found.least <= exact.least and exact.most <= found.most
    assert found.least <= sum(train(other, thresholds)[1]) <= found.most


@law
@given(own=choices, thresholds=trainings.filter(bool))
def test_of_the_logs_own_configuration_everything_is_known(
    own: PolicyChoice, thresholds: list[float]
) -> None:
    scales, overflows = train(own, thresholds)
    found = bound_skips(own, log_of(scales, overflows))
    assert (found.least, found.most, found.exact) == (sum(overflows), sum(overflows), True)


def by_trying(choice: PolicyChoice, log: ScalingLog) -> tuple[int, int]:
    """The bounds by following every way one by one."""
    ways: set[tuple[float, int, int]] = {(choice.parameters["init_scale"], 0, 0)}
    for safe, unsafe in zip(log.safe_up_to, log.unsafe_from, strict=True):
        after = set()
        for scale, tracker, skipped in ways:
            for overflow in (False, True):
                if (overflow and scale <= safe) or (not overflow and scale >= unsafe):
                    continue
                policy = choice.make()
                policy.load_state_dict({"scale": scale, "tracker": tracker})
                policy.update(overflow)
                after.add((*policy.state_dict().values(), skipped + overflow))
        ways = after
    counts = [skipped for _, _, skipped in ways]
    return min(counts), max(counts)


@settings(deadline=None, max_examples=60)
@given(own=choices, other=choices, thresholds=trainings.map(lambda t: t[:14]).filter(bool))
def test_bounds_are_attained(
    own: PolicyChoice, other: PolicyChoice, thresholds: list[float]
) -> None:
    log = log_of(*train(own, thresholds))
    found = bound_skips(other, log)
    if found.exact:
        assert (found.least, found.most) == by_trying(other, log)


def test_bounds_by_hand() -> None:
    # From 16 the log is safe at 8, and unknown above: 16 may overflow once, and is then at 8.
    log = pattern_log("8F 8F 8F")
    found = bound_skips(torch(init_scale=16, growth_interval=100), log)
    assert (found.least, found.most, found.final_scale) == (0, 1, (8, 16))
    # From 32 an overflow at 8 is an overflow at any larger scale.
    log = pattern_log("8X 4F 4F")
    assert bound_skips(torch(init_scale=32), log).least == 1
    # Below 8 that step is unknown, the others are safe.
    found = bound_skips(torch(init_scale=2), log)
    assert (found.least, found.most) == (0, 1)
    # Where a row is missing nothing is known.
    found = bound_skips(torch(init_scale=2), pattern_log("8F ? 8F"))
    assert (found.least, found.most) == (0, 1)


def test_an_overflow_now_can_save_two_later() -> None:
    """Taking each unknown step as safe does not give the fewest skipped steps."""
    # From 16, with a growth after 2: left alone, it grows to 32 and then falls twice to 8. An
    # overflow in the first step, which nothing excludes, leaves it at 8 with no growth due.
    log = pattern_log("8F 8F 16X 16X 8F")
    found = bound_skips(torch(init_scale=16, growth_interval=2), log)
    greedy = sum(train(torch(init_scale=16, growth_interval=2), [99, 99, 16, 16, 99])[1])
    assert (found.least, greedy) == (1, 2)


def test_long_calms_are_passed_over_at_once() -> None:
    steps = 50_000
    log = log_of([2.0**16] * steps, [False] * steps)
    found = bound_skips(torch(init_scale=2.0**10, growth_interval=20_000), log)
    assert (found.least, found.most, found.final_scale) == (0, 0, (2.0**12, 2.0**12))


def test_bounds_are_for_torchs_rule() -> None:
    with pytest.raises(ValueError, match="bounds are those of policy torch, not of megatron"):
        bound_skips(PolicyChoice.of("megatron"), pattern_log("8F"))


# --- the scaler that wrote a log ----------------------------------------------------------------


@law
@given(own=choices, thresholds=trainings.filter(bool))
def test_the_inferred_scaler_writes_the_same_log(
    own: PolicyChoice, thresholds: list[float]
) -> None:
    scales, overflows = train(own, thresholds)
    assume(min(scales) > 2.0**-100 and max(scales) < 2.0**100)  # rounding hides factors at 0
    found = infer(log_of(scales, overflows))
    assert found.fault is None
    inferred = found.choice()
    assert inferred is not None
    assert train(inferred, thresholds) == (scales, overflows)


@law
@given(data=st.data(), thresholds=trainings.filter(bool))
def test_short_parameters_that_acted_are_found_exactly(
    data: st.DataObject, thresholds: list[float]
) -> None:
    own = torch(
        init_scale=2.0**12,
        growth_factor=data.draw(st.sampled_from([2.0, 1.5, 4.0, 1.001])),
        backoff_factor=data.draw(st.sampled_from([0.5, 0.75, 0.1])),
        growth_interval=data.draw(st.integers(1, 9)),
    )
    scales, overflows = train(own, thresholds)
    assume(min(scales) > 2.0**-100 and max(scales) < 2.0**100)
    found = infer(log_of(scales, overflows))
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(found, name) in (None, own.parameters[name]), name
    moves = {b / a for a, b in itertools.pairwise(scales)}
    assert (found.growth_factor is not None) == any(ratio > 1 for ratio in moves)
    assert (found.backoff_factor is not None) == any(ratio < 1 for ratio in moves)


def test_a_log_printed_with_six_digits_is_still_that_of_a_grad_scaler() -> None:
    own = torch(init_scale=2.0**20 / 3, growth_factor=1.3, backoff_factor=0.7, growth_interval=4)
    scales, overflows = train(own, ([2.0**30] * 9 + [2.0**10] * 2) * 5)
    printed = [float(f"{scale:.6g}") for scale in scales]
    assert printed != scales
    found = infer(log_of(printed, overflows))
    assert (found.fault, found.growth_interval) == (None, 4)
    assert (found.growth_factor, found.backoff_factor) == (1.3, 0.7)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("8F 4F 4F", "the scale falls from 8 to 4 after step 0, no overflow"),
        ("8F 8X 16F", "the scale rises from 8 to 16 after the overflow of step 1"),
        (
            "8X 4X 1F",
            "the overflow of step 1 multiplied the scale by 0.25, step 0 by 0.5",
        ),
        (
            "8X 8X 4F",
            "the overflow of step 1 multiplied the scale by 0.5, step 0 by 1; a hysteresis, as "
            "DeepSpeed and Megatron have, does that",
        ),
        ("8F 16F 64F", "the growth of step 1 multiplied the scale by 4, step 0 by 2"),
        (
            "8F 8F 16F 16F 16F 32F",
            "the scale does not grow after 2 finite steps, at step 3, though it did after 2 before",
        ),
        (
            "8F 8F 16F 32F",
            "the scale grows after 1 finite steps, at step 2, and after 2 before",
        ),
        (
            "8F 8F 8X 4F 8F",
            "the scale grows after 1 finite steps, at step 3, but not after 2 before",
        ),
    ],
)
def test_the_first_step_that_no_grad_scaler_explains_is_named(text: str, fault: str) -> None:
    found = infer(pattern_log(text))
    assert found.fault == fault
    assert found.choice() is None
    cut = int(fault.partition("step ")[2].split()[0].rstrip(","))
    words = text.split()
    first = next(
        i for i in range(1, len(words) + 1) if infer(pattern_log(" ".join(words[:i]))).fault
    )
    assert str(first - 2) in fault.replace(",", " ").split() and cut <= first


def test_nothing_is_concluded_across_a_missing_row() -> None:
    assert infer(pattern_log("8F ? 2F 2F 4F")).fault is None
    assert infer(pattern_log("8F 8F ? 8F 16F")).growth_interval is None
    log = pattern_log("8F 8F 16F")
    resumed = ScalingLog(log.path, 700, log.scale, log.overflow, log.largest_gradient, 3)
    assert infer(resumed).growth_interval is None, "steps before the log may count"


# --- estimates ----------------------------------------------------------------------------------


@law
@given(own=choices, thresholds=trainings.filter(bool), data=st.data())
def test_an_estimate_never_contradicts_the_log(
    own: PolicyChoice, thresholds: list[float], data: st.DataObject
) -> None:
    scales, overflows = train(own, thresholds)
    assume(min(scales) > 2.0**-100)
    largest = data.draw(
        st.none() | st.lists(st.floats(0, 1e9), min_size=len(scales), max_size=len(scales))
    )
    log = log_of(scales, overflows, **({} if largest is None else {"largest": largest}))
    driven = drive([own, torch()], estimate(log))
    assert driven.skipped[0] == sum(overflows)
    found = bound_skips(torch(), log)
    assert found.least <= driven.skipped[1] <= found.most
    assert driven.longest_streak[1] > 0 or driven.skipped[1] == 0


def test_largest_gradients_are_calibrated_with_the_logs_own_overflows() -> None:
    # Gradients of activations are 8 times as large as those of the parameters.
    waves = [2.0 ** (3 * math.sin(step / 9)) for step in range(400)]
    thresholds = [65520 / (8 * wave) for wave in waves]
    scales, overflows = train(torch(growth_interval=10), thresholds)
    largest = [math.nan if flag else w for flag, w in zip(overflows, waves, strict=True)]
    log = log_of(scales, overflows, largest=largest)
    guess = estimate(log)
    assert f"of the log's {sum(overflows)} overflows best" in guess.how
    factor = float(guess.how.split("overflows where ")[1].split()[0])
    assert factor == pytest.approx(8, rel=0.3)
    for other in (torch(), torch(init_scale=2.0**10, growth_interval=25)):
        true = sum(train(other, thresholds)[1])
        assert abs(drive([other], guess).skipped[0] - true) <= max(2, 0.2 * true)


def test_without_overflows_largest_gradients_are_taken_as_they_are() -> None:
    log = log_of([8.0] * 3, [False] * 3, largest=[1.0, math.nan, 2.0])
    guess = estimate(log)
    assert guess.largest.tolist() == pytest.approx([1, math.sqrt(2), 2])
    assert "it has no overflow to tell by how much" in guess.how


def test_without_largest_gradients_thresholds_lie_between_an_overflow_and_its_backoff() -> None:
    guess = estimate(pattern_log("32X 16F 16F 16F 16X 8F"))
    thresholds = 65520 / guess.largest
    assert thresholds[0] == pytest.approx(32 / math.sqrt(2))
    assert thresholds[4] == pytest.approx(16 / math.sqrt(2))
    assert all(thresholds[1:4] > 16) and 8 < thresholds[5] < 16
    assert not guess.certain_only


def test_the_ranking_goes_by_skips_then_by_the_distance_from_the_largest_safe_scale() -> None:
    log = log_of([2.0**16] * 8, [False] * 8)
    magnitudes = Estimate(np.ones(8), "", False)  # safe up to 2^15
    rows = [
        torch(),
        torch(init_scale=2.0**10),
        torch(init_scale=2.0**15),
        torch(growth_interval=99),
    ]
    driven = drive(rows, magnitudes)
    assert driven.skipped.tolist() == [1, 0, 0, 1]
    assert driven.ranked() == [[2], [1], [0, 3]], len(log.scale)


# --- reading ------------------------------------------------------------------------------------


def write(text: str, name: str = "run.csv") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


ROWS = [(0, 65536.0, True), (1, 32768.0, False), (2, 32768.0, False)]
SPELLINGS = {
    "csv": "step,scale,overflow\n0,65536,1\n1,32768.0,0\n2,32768,0\n",
    "words": "step,scale,overflow\n0,65536,True\n1,32768,False\n2,32768,false\n",
    "floats": "step,scale,found_inf\n0,65536,1.0\n1,32768,0.0\n2,32768,0.0\n",
    "other names": "Global_Step, loss_scale, skipped\n0, 65536, yes\n1, 32768, no\n2, 32768, no\n",
    "semicolons": "step;scale;overflow;loss\n0;65536;1;nan\n1;32768;0;1\n2;32768;0;1\n",
    "with a mark": "\ufeffstep\tscale\toverflow\n0\t65536\t1\n1\t32768\t0\n2\t32768\t0\n",
    "json lines": '{"step": 0, "scale": 65536, "overflow": true}\n\n'
    '{"step": 1, "scale": 32768, "overflow": false}\n{"step": 2, "scale": 32768, "overflow": 0}\n',
    "cut off json": '{"step": 0, "scale": 65536, "overflow": true}\n'
    '{"step": 1, "scale": 32768, "overflow": false}\n{"step": 2, "scale": 32768, "overflow": 0}\n'
    '{"step": 3, "sc',
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_logs_are_read_however_they_are_spelled(kind: str) -> None:
    log = read_log(write(SPELLINGS[kind]))
    assert (log.first, log.rows, log.notes) == (0, 3, ())
    steps = zip(range(3), log.scale.tolist(), (log.overflow == OVERFLOW).tolist(), strict=True)
    assert list(steps) == ROWS


def test_the_trace_of_a_run_is_a_log_with_largest_gradients(folder: Path) -> None:
    spec = make_plan({"default": {"growth_interval": 5}}, seeds=[0]).run("binary", "default", 0)
    write_crafted(folder, spec, Fate(skipped=[3, 30]))
    log = read_log(folder / spec.folder)
    assert log.steps == 100 and np.flatnonzero(log.overflowed).tolist() == [3, 30]
    assert log.largest_gradient[0] * log.scale[0] == pytest.approx(65504 / 2**4)
    assert math.isnan(log.largest_gradient[3])
    assert infer(log).choice() == torch(growth_interval=5)


WRITE = "write a row a step with the columns step, scale, overflow"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", f"run.csv holds no row; {WRITE}"),
        ("step,scale,overflow\n", f"run.csv holds no row; {WRITE}"),
        ("step,loss\n0,1\n", f"run.csv has no column 'scale', but 'step', 'loss'; {WRITE}"),
        ("0,65536,0\n1,65536,0\n", f"run.csv has no column 'step', but '0', '65536'; {WRITE}"),
        (
            "step,scale,overflow\n0,65536,maybe\n",
            "run.csv, line 2: overflow is 'maybe'; write 1 for an overflow, else 0",
        ),
        (
            "step,scale,overflow\n0,big,0\n",
            "run.csv, line 2: scale is 'big'; write the scale of the step, such as 65536",
        ),
        (
            "step,scale,overflow\n0,-1,0\n",
            "run.csv, line 2: scale is '-1'; write the scale of the step, such as 65536",
        ),
        (
            "step,scale,overflow\nx,1,0\n",
            "run.csv, line 2: the step 'x' is no whole number; write 0, 1, 2, …",
        ),
        (
            "step,scale,overflow\n0.5,1,0\n",
            "run.csv, line 2: the step '0.5' is no whole number; write 0, 1, 2, …",
        ),
        (
            "step,scale,overflow,largest_gradient\n0,1,0,much\n",
            "run.csv, line 2: largest_gradient is 'much'; write the largest unscaled gradient "
            "magnitude",
        ),
        (
            "step,scale,overflow\n0,1,0\n9999999,1,0\n",
            "run.csv: steps 0 to 9999999 are more than 1000000; give a part of the log",
        ),
        ('{"step": 0\n{"step": 1}\n', "run.csv, line 1 is not JSON; write an object a line"),
        (
            '{"step": 0, "scale": 1, "overflow": 0}\n[1]\n',
            f"run.csv, line 2 is no JSON object; {WRITE}",
        ),
        (
            "step,scale,overflow\n0,,\n1,nan,\n",
            "run.csv: no row has both a scale and an overflow; write both at each step",
        ),
    ],
)
def test_what_is_no_log_is_refused_with_one_line(text: str, line: str) -> None:
    write(text)
    assert refuse("run.csv") == line


def test_files_that_are_no_log_are_refused(folder: Path) -> None:
    assert refuse("gone.csv") == "--log gone.csv: No such file or directory; name the file of a log"
    Path("b").write_bytes(b"\xff\xfe\x00")
    assert refuse("b") == f"b is neither text nor Parquet; {WRITE}, as CSV"
    Path("p").write_bytes(b"PAR1 and no more")
    assert refuse("p").startswith("p is no whole Parquet file (")
    pq.write_table(pa.table({"loss": [1.0]}), "other.parquet")
    assert refuse("other.parquet") == f"other.parquet holds no row; {WRITE}"


# --- what is out of order, and what can still be concluded --------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["replay", "--log", *arguments])
    return result.exit_code, result.stdout, result.stderr


def refuse(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    return line.removeprefix("halfscale replay: ")


def notes_of(rows: Sequence[Mapping[str, object]] | str) -> list[str]:
    """What the command says of a log, in its JSON and on the terminal alike."""
    text = rows
    if not isinstance(text, str):
        text = "\n".join(json.dumps(row) for row in rows) + "\n"
    write(str(text))
    grid = ("--grid", "init_scale=2**4,2**8")
    code, out, err = run("run.csv", *grid, "--json")
    assert (code, err) == (0, "")
    notes: list[str] = json.loads(out)["notes"]
    code, shown, err = run("run.csv", *grid)
    assert (code, err) == (0, "")
    for note in notes:
        assert f"- {note}" in " ".join(shown.split()), note
    return notes


def csv_of(text: str, first: int = 0) -> str:
    log = pattern_log(text)
    rows = [
        f"{first + step},{log.scale[step]:g},{log.overflow[step]}"
        for step in np.flatnonzero(log.known)
    ]
    return "\n".join(["step,scale,overflow", *rows]) + "\n"


def says(notes: list[str], *parts: str) -> None:
    assert len(notes) == len(parts), notes
    for note, part in zip(notes, parts, strict=True):
        assert part in note


MOVED = "the scale moved as torch.amp.GradScaler moves it: init_scale=16, growth_factor"


def test_a_consistent_log_names_its_scaler() -> None:
    notes = notes_of(csv_of("16X 8F 8F 16F 16F 32X 16F"))
    assert notes == [
        "the scale moved as torch.amp.GradScaler moves it: init_scale=16, growth_factor=2, "
        "backoff_factor=0.5, growth_interval=2"
    ]
    notes = notes_of(csv_of("16F 16F 16X 8F"))
    assert notes == [
        "the scale moved as torch.amp.GradScaler moves it: init_scale=16, growth_factor unknown, "
        "it never grew, backoff_factor=0.5, growth_interval more than 2"
    ]


def test_a_log_without_overflows_gives_a_lower_bound() -> None:
    says(
        notes_of(csv_of("16F 16F 32F 32F")),
        MOVED,
        "there is no overflow: only a lower bound of the largest safe scale is known, 2**5 at best",
    )
    _code, out, _ = run("run.csv", "--compare", "init_scale=4", "--compare", "init_scale=2**9")
    table = {row.split("  ")[-1]: row.split() for row in out.splitlines()}
    assert table["--compare init_scale=4"][:4] == ["0", "-", "-", "-"]
    assert table["--compare init_scale=2**9"][0] == "0–4", "nothing is known up there"
    assert "Estimate: none: without an overflow" in out and "GradScaler(" not in out


def test_a_constant_scale_says_nothing_of_the_factors() -> None:
    says(notes_of(csv_of("16F 16F")), "the scale is 16 throughout", "there is no overflow")
    says(notes_of(csv_of("16F 16X 16F 16X")), "the scale is 16 throughout")


def test_missing_steps_are_unknown() -> None:
    notes = notes_of(csv_of("16F ? ? 16X 8F"))
    says(notes, "2 steps are missing, the first 1: whether they overflowed is unknown", MOVED)
    notes = notes_of(csv_of("16F ? ? 16F ? ? 16X ? ? 8F"))
    says(notes, "6 steps are missing, the first 1 (one row in about 2 steps)", MOVED)


def test_blank_values_are_unknown() -> None:
    text = "step,scale,overflow\n0,16,0\n1,,0\n2,16,\n3,16,nan\n4,16,1\n5,8,0\n6,8\n"
    notes = notes_of(text)
    says(notes, "4 rows have no scale or no overflow, the first at step 1", MOVED)


def test_rows_out_of_order_are_sorted() -> None:
    text = "step,scale,overflow\n1,16,1\n0,16,0\n2,8,0\n"
    notes = notes_of(text)
    says(notes, "the rows are not in the order of the steps (step 0 comes late); sorted", MOVED)


def test_of_repeated_steps_the_last_counts() -> None:
    text = "step,scale,overflow\n0,16,0\n0,16,0\n1,16,1\n2,8,0\n"
    says(notes_of(text), "1 row repeats a step that was there already", MOVED)
    text = "step,scale,overflow\n0,16,0\n1,99,0\n1,16,1\n2,8,0\n"
    notes = notes_of(text + "1,16,1\n2,8,0\n")
    assert notes[0].startswith("the rows are not in the order of the steps (step 1 comes late)")
    assert notes[1] == (
        "3 rows repeat a step that was there already, step 1 with other values: the last row counts"
    )
    assert read_log(Path("run.csv")).scale.tolist() == [16, 16, 8]


def test_without_a_column_of_overflows_the_falls_of_the_scale_tell() -> None:
    notes = notes_of("step,scale\n0,16\n1,16\n2,8\n3,8\n")
    says(notes, "there is no column overflow: a step is taken to overflow where the scale", MOVED)
    log = read_log(Path("run.csv"))
    assert log.overflow.tolist() == [NONE, OVERFLOW, NONE, UNKNOWN]


def test_a_scale_logged_after_the_update_is_given_to_the_next_step() -> None:
    own = torch(init_scale=16, growth_interval=3)
    scales, overflows = train(own, [99, 16, 99, 99, 99, 99, 16, 8, 99, 99])
    after = [*scales[1:], 8.0]
    rows = [f"{i},{s:g},{int(o)}" for i, (s, o) in enumerate(zip(after, overflows, strict=True))]
    notes = notes_of("\n".join(["step,scale,overflow", *rows]) + "\n")
    assert "it was logged after scaler.update(): each row is given the scale" in notes[0]
    log = examine(Path("run.csv")).log
    assert log.first == 1 and log.scale.tolist() == scales[1:]
    assert log.overflowed.tolist() == overflows[1:]


@given(own=choices, thresholds=trainings.filter(lambda t: len(t) > 3))
def test_a_scale_logged_before_the_update_is_left_alone(
    own: PolicyChoice, thresholds: list[float]
) -> None:
    from halfscale.logs.log import scales_of_steps

    log = log_of(*train(own, [*thresholds, math.inf, math.inf]))
    assume(log.scale.min() > 0)
    assert scales_of_steps(log) is log


def test_overflows_that_contradict_the_scale_are_unknown() -> None:
    notes = notes_of(csv_of("16F 16F 8F 8X 4F"))
    says(
        notes,
        "the overflow column contradicts the scale at 1 step, the first 1 (a fall without an "
        "overflow, or a rise after one); whether they overflowed is taken as unknown",
        "no torch.amp.GradScaler moves a scale so: the scale falls from 16 to 8 after step 1, no "
        "overflow; the ranges below hold all the same",
    )
    assert examine(Path("run.csv")).log.overflow.tolist() == [NONE, UNKNOWN, NONE, OVERFLOW, NONE]


def test_a_scale_that_no_grad_scaler_moves_is_still_replayed() -> None:
    policy, rows = make_policy("megatron", init_scale=64, hysteresis=2, growth_interval=9), []
    for step in range(12):
        rows.append({"step": step, "scale": policy.scale, "overflow": policy.scale >= 16})
        policy.update(policy.scale >= 16)
    notes = notes_of(rows)
    says(notes, "a hysteresis, as DeepSpeed and Megatron have, does that; the ranges below hold")
    report = examine(Path("run.csv"), compared=["init_scale=64"])
    (row,) = [row for row in report.named if row.name == "--compare init_scale=64"]
    assert row.bounds
    true = sum(train(torch(init_scale=64), [16.0] * 12)[1])
    assert row.bounds.least <= true <= row.bounds.most


def test_a_log_that_begins_late_starts_every_configuration_anew() -> None:
    notes = notes_of(csv_of("16F 16X 8F", first=700))
    says(notes, MOVED, "the log begins at step 700: every configuration is started there anew")


def test_gradients_logged_before_they_were_unscaled_are_noticed() -> None:
    rows = [
        {"step": step, "scale": 1024, "overflow": False, "largest_gradient": 100.0 * 1024}
        for step in range(5)
    ]
    notes = notes_of(rows)
    assert any("was it logged before it was unscaled? log it divided" in note for note in notes)
    rows[0]["largest_gradient"] = 100.0
    for row in rows[1:]:
        row["largest_gradient"] = 1.0
    assert any("(fp32 layers or accumulated gradients" in note for note in notes_of(rows))


# --- the command --------------------------------------------------------------------------------


def replay_log(*arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, ""), err
    return out


def test_the_table_has_the_best_the_logs_own_the_defaults_and_what_is_compared() -> None:
    own = torch(init_scale=2.0**10, growth_interval=10)
    scales, overflows = train(own, [2.0**11, *[2.0**12] * 59, 2.0**9])
    rows = [f"{i},{s:g},{int(o)}" for i, (s, o) in enumerate(zip(scales, overflows, strict=True))]
    write("\n".join(["step,scale,overflow", *rows]) + "\n")
    out = replay_log("run.csv", "--compare", "init_scale=2**20", "--top", "3")
    lines = out.splitlines()
    count = sum(overflows)
    assert lines[0] == (
        f"run.csv: steps 0 to 60, 61 rows, {count} overflows, the scale from 2**10 to 2**12"
    )
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["rank"])
    table = [line.split(maxsplit=5) for line in lines[head + 1 : head + 7]]
    assert [row[0] for row in table[:3]] == ["1", "2", "3"]
    assert table[3][:2] == [str(count), str(count)]
    assert lines[head + 4].endswith("this log's own")
    assert lines[head + 5].endswith("PyTorch's defaults")
    assert lines[head + 6].endswith("--compare init_scale=2**20")
    assert "scaler = torch.amp.GradScaler(" in out
    for name, choice in (("PyTorch's defaults", torch()), ("2**20", torch(init_scale=2.0**20))):
        true = sum(train(choice, [2.0**11, *[2.0**12] * 59, 2.0**9])[1])
        (line,) = [line for line in lines[head:] if line.endswith(name)]
        low, _, high = line.split()[0].partition("–")
        assert int(low) <= true <= int(high or low)


def test_of_a_long_log_only_what_is_named_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfscale.logs.report.LONG", 2)
    write(csv_of("16F 16X 8F"))
    out = replay_log("run.csv", "--grid", "init_scale=4")
    assert "(-: of more than 2 steps bounds are computed for --compare alone)" in out
    data = json.loads(replay_log("run.csv", "--grid", "init_scale=4", "--json"))
    assert data["ranked"][0]["bounds"] is None
    assert data["compared"][0]["bounds"]["least"] == 1


def test_the_json_has_everything() -> None:
    write(csv_of("16X 8F 8F 16F 16F 32X 16F"))
    data = json.loads(replay_log("run.csv", "--json", "--top", "2"))
    assert data["inferred"] == {
        "init_scale": 16.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "longest_clean": 1,
        "fault": None,
    }
    own, default = data["compared"]
    assert (own["name"], own["bounds"]["least"], own["bounds"]["most"]) == ("this log's own", 2, 2)
    assert (default["name"], default["estimated_skipped"] >= 2) == ("PyTorch's defaults", True)
    assert len(data["ranked"]) == 2 and data["overflows"] == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--policy", "keras"),
            "--policy: a log is replayed with policy torch alone; leave it out",
        ),
        (
            ("--compare", "policy=keras"),
            "--compare policy=keras: a log is replayed with policy torch alone; leave out policy",
        ),
        (("--grid", "x"), "--grid x: write it as --grid init_scale=2**8,2**12,2**16 or --grid"),
    ],
)
def test_what_cannot_be_asked_of_a_log(arguments: tuple[str, ...], line: str) -> None:
    write(csv_of("16F"))
    assert refuse("run.csv", *arguments).startswith(line)


def test_a_scale_that_leaves_zero_is_a_fault_in_words() -> None:
    write("step,scale,overflow\n0,2,1\n1,0,0\n2,4,0\n3,4,0\n")
    inferred = infer(read_log(Path("run.csv")))
    assert inferred.fault == "the scale rises from 0 to 4 after step 1, which no factor does"
    assert inferred.choice() is None
    result = CliRunner().invoke(app, ["replay", "--log", "run.csv", "--grid", "init_scale=2,4"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "rises from 0 to 4 after step 1" in " ".join(result.stdout.split())


@pytest.mark.parametrize("at", [0, 2])
def test_a_stray_quote_is_named_by_its_line(at: int) -> None:
    lines = ["step,scale,overflow", *(f"{step},65536,0" for step in range(20_000))]
    lines[at] = lines[at].replace(",", ',"', 1)
    write("\n".join(lines))
    with pytest.raises(ValueError, match=rf"^run\.csv, line {at + 1} is not CSV \(.+\); mend it"):
        read_log(Path("run.csv"))
