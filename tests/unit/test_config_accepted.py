"""Accepted spellings, and files that differ only in how they are written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from halfscale.config import flow, parse_number, read_config
from halfscale.plan import Plan
from halfscale.planner import build_plan


def plan_of(path: Path, text: str | bytes) -> Plan:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return build_plan(read_config(path), str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


SPELLINGS = {
    65536.0: [
        *("65536", "65536.0", "65536.", "6.5536e4", "6.5536e+4", "0x10000", "0X10000", "+65536"),
        *("2**16", "'2**16'", '"2**16"', "2 ** 16", '"2^16"', "4**8", "65_536", "'65536'"),
    ],
    1e4: ["1e4", "1E4", "1e+4", "1.0e+4", "10000", "'1e4'", "10**4"],
    1e-5: ["1e-5", "1.0e-5", "0.00001", ".00001", "'1e-5'", "10**-5"],
    0.5: ["0.5", ".5", "5e-1", "2**-1", "'2**-1'", '"0.5"'],
}


@pytest.mark.parametrize(
    ("number", "spelling"), [(number, text) for number, all_ in SPELLINGS.items() for text in all_]
)
def test_every_spelling_of_a_number_gives_the_same_plan(
    path: Path, number: float, spelling: str
) -> None:
    text = "device: cpu\nconfigurations:\n  a:\n    init_scale: {}\n"
    plain = build_plan({"device": "cpu", "configurations": {"a": {"init_scale": number}}})
    assert plan_of(path, text.format(spelling)).canonical_json() == plain.canonical_json()


@pytest.mark.parametrize("spelling", ["20", "20.0", "2e1", "0x14", "'20'"])
def test_every_spelling_of_a_whole_number_gives_the_same_plan(path: Path, spelling: str) -> None:
    text = (
        "device: cpu\nconfigurations: {{a: {{growth_interval: {0}}}}}\nseeds: [{0}]\n"
        "threads: {0}\nworkloads: {{binary: {{steps: {0}, hidden: {0}, learning_rate: {0}}}}}\n"
    )
    assert plan_of(path, text.format(spelling)) == plan_of(path, text.format("20"))


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_as_python_prints_it_is_read_exactly(number: float) -> None:
    assert parse_number(repr(number)) == number
    assert parse_number(number) == number


@given(exponent=st.integers(-1000, 1000))
def test_powers_of_two_are_exact(exponent: int) -> None:
    assert parse_number(f"2**{exponent}") == 2.0**exponent
    assert parse_number(f"2^{exponent}") == 2.0**exponent


@given(number=st.integers(0, 2**1000))
def test_hexadecimal_is_exact(number: int) -> None:
    assert parse_number(hex(number)) == number


@given(
    value=st.one_of(
        st.text(st.characters(codec="ascii")),
        st.from_regex(r"[0-9.]{1,4} ?(\*\*|\^) ?[+-]?[0-9]{1,6}", fullmatch=True),
        st.floats(),
        st.integers(),
        st.booleans(),
        st.none(),
        st.binary(),
        st.lists(st.integers()),
    )
)
@example(10**400)
@example("1" + "0" * 5000)
@example("0**-1")
@example("1.2.3**4")
@example("9" * 400 + "**9")
def test_anything_is_a_finite_number_or_refused(value: object) -> None:
    try:
        number = parse_number(value)
    except ValueError as error:
        assert str(error) in ("is not a number", "is not finite")
    else:
        assert type(number) in (int, float)
        assert math.isfinite(number)


CONTENT: dict[str, Any] = {
    "configurations": {
        "b": {"init_scale": 2.0, "growth_factor": 4.0},
        "a": {"growth_interval": 7, "backoff_factor": 0.25},
    },
    "workloads": {"digits": {"steps": 5, "channels": 2}, "binary": {"hidden": 3, "steps": 9}},
    "seeds": [3, 0, 11],
    "device": "cpu",
    "threads": 2,
}


def reordered(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: reordered(value[key], draw) for key in keys}
    return draw(st.permutations(value)) if isinstance(value, list) else value


@given(data=st.data())
def test_the_order_of_keys_and_seeds_does_not_change_the_plan(tmp_path: Path, data: Any) -> None:
    content = reordered(CONTENT, data.draw)
    text = yaml.safe_dump(
        content, sort_keys=False, default_flow_style=data.draw(st.sampled_from([True, False, None]))
    )
    plain = build_plan(CONTENT).canonical_json()
    assert plan_of(tmp_path / "config.yaml", text).canonical_json() == plain


def test_comments_line_ends_and_byte_order_marks_do_not_change_the_plan(path: Path) -> None:
    text = yaml.safe_dump(CONTENT)
    commented = "# what to compare\n" + text.replace("\n", "  # why\n\n")
    plain = plan_of(path, text)
    assert plan_of(path, commented) == plain
    assert plan_of(path, text.replace("\n", "\r\n")) == plain
    assert plan_of(path, b"\xef\xbb\xbf" + text.encode()) == plain


def test_a_folder_with_spaces_quotes_and_letters_beyond_ascii(awkward: Path) -> None:
    assert plan_of(awkward / "config.yaml", yaml.safe_dump(CONTENT)) == build_plan(CONTENT)


def test_yaml_merge_keys_and_anchors_work(path: Path) -> None:
    plan = plan_of(
        path,
        "device: cpu\nconfigurations:\n  a: &base {init_scale: 4, growth_factor: 3}\n"
        "  b:\n    <<: *base\n    growth_factor: 5\n  c: *base\n",
    )
    assert plan.configurations["b"].parameters["init_scale"] == 4.0
    assert plan.configurations["b"].parameters["growth_factor"] == 5.0
    assert plan.configurations["c"] == plan.configurations["a"]


def test_what_is_left_out_has_defaults(path: Path) -> None:
    plan = plan_of(path, "configurations: {a: , b: {}}\ndevice: cpu\n")
    assert plan.configurations["a"] == plan.configurations["b"]
    assert plan.configurations["a"].policy == "torch"
    assert plan.configurations["a"].parameters == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }
    assert plan.seeds == (0, 1, 2, 3, 4)
    assert list(plan.workloads) == ["binary", "digits"]


def test_the_configuration_that_ships_is_accepted_and_holds_the_published_five() -> None:
    shipped = Path(__file__).parents[2] / "config.yaml"
    plan = build_plan({**read_config(shipped), "device": "cpu"})
    published = {
        "default": (2.0**16, 2.0, 0.5),
        "low-init": (2.0**8, 2.0, 0.5),
        "high-init": (2.0**24, 2.0, 0.5),
        "slow-growth": (2.0**16, 1.5, 0.5),
        "fast-growth-deep-backoff": (2.0**16, 4.0, 0.25),
    }
    found = {
        name: tuple(list(block.parameters.values())[:3])
        for name, block in plan.configurations.items()
    }
    assert found == published
    steps = min(block.steps for block in plan.workloads.values())
    intervals = [block.parameters["growth_interval"] for block in plan.configurations.values()]
    assert max(intervals) < steps / 2


flat = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)
)
keys = st.from_regex(r"[a-z][a-z_]{0,10}[a-z]", fullmatch=True)


@given(block=st.dictionaries(keys, st.one_of(flat, st.dictionaries(keys, flat)), min_size=1))
def test_a_suggested_block_is_one_line_and_parses_back(block: dict[str, Any]) -> None:
    text = flow(block)
    assert len(text.splitlines()) == 1
    assert yaml.safe_load(text if len(block) == 1 else f"{{{text}}}") == block


@pytest.mark.parametrize("name", ["small", "policies", "workloads"])
def test_every_example_is_accepted(name: str) -> None:
    example = Path(__file__).parents[2] / "examples" / f"{name}.yaml"
    assert list(build_plan({**read_config(example), "device": "cpu"}).runs())
