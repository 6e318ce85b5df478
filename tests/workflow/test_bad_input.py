"""Bad input through Snakemake: one line that says what to write, nothing run, nothing lost."""

from __future__ import annotations

import pytest

from .driver import ARMS, CONFIG, CONTROLS, PROBE, Bench, Finished, snapshot, trains


def assert_refused(finished: Finished, *fragments: str) -> None:
    assert finished.code != 0, finished.text
    assert len(finished.complaints) == 1, finished.text
    missing = [text for text in fragments if text not in finished.complaints[0]]
    assert not missing, finished.complaints[0]
    assert "Traceback" not in finished.text
    assert "Job stats" not in finished.text


def assert_nothing_made(bench: Bench) -> None:
    assert not (bench.path / "results").exists()
    assert not (bench.path / "reports").exists()


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        pytest.param(
            "init_scale: 256",
            "init_scal: 256",
            ["configurations.second.init_scal: 256", "{second: {init_scale: 256}}"],
            id="unknown-key",
        ),
        pytest.param(
            "init_scale: 256",
            "init_scale: .nan",
            ["configurations.second.init_scale: nan", "{second: {init_scale: 65536.0}}"],
            id="nan",
        ),
        pytest.param(
            "init_scale: 256",
            "init_scale: 0",
            ["configurations.second.init_scale: 0", "{second: {init_scale: 65536.0}}"],
            id="zero",
        ),
        pytest.param(
            "growth_interval: 1",
            "growth_interval: 2.5",
            ["configurations.second.growth_interval: 2.5", "{second: {growth_interval: 2000}}"],
            id="fraction",
        ),
        pytest.param(
            "  second:",
            "  First:",
            ["configurations.First", "only in case", "write: configurations: {First-2:"],
            id="same-name-in-another-case",
        ),
        pytest.param(
            "  second:",
            "  first:",
            ["'first' stands twice", "line 3", "line 4", "first-2"],
            id="repeated-name",
        ),
        pytest.param("  second:", "  no:", ["line 4", "the name no", "run-no"], id="name-no"),
        pytest.param(
            "  second:",
            "  ../x:",
            ["configurations.../x", "folder name", "write: configurations: {x:"],
            id="name-with-path",
        ),
        pytest.param(
            "  second:",
            '  "{x}":',
            ["configurations.{x}", "folder name", "write: configurations: {x:"],
            id="name-with-wildcard",
        ),
        pytest.param("[0]", "[]", ["seeds: []", "write: seeds: [0, 1, 2, 3, 4]"], id="no-seeds"),
        pytest.param("[0]", "[3, 3]", ["seeds: [3, 3]", "write: seeds: [3]"], id="repeated-seed"),
        pytest.param(
            "binary:",
            "binray:",
            ["workloads.binray", "write: workloads: {binary: {steps: 5}}"],
            id="unknown-workload",
        ),
        pytest.param("seeds: [0]", "seeds: [0", ["line ", "is not YAML"], id="not-yaml"),
        pytest.param(CONFIG, "", ["empty", "write at least: configurations:"], id="empty-file"),
    ],
)
def test_a_bad_configuration_ends_with_one_line_and_runs_nothing(
    empty: Bench, old: str, new: str, fragments: list[str]
) -> None:
    empty.edit(old, new)
    assert_refused(empty.snakemake(), "config.yaml", *fragments)
    assert_nothing_made(empty)


def test_a_missing_configuration_falls_back_to_the_one_beside_the_snakefile(empty: Bench) -> None:
    (empty.path / "config.yaml").unlink()
    assert "binary/default/seed0" in empty.plan().trains


def test_a_bad_configuration_leaves_old_results_as_they_are(bench: Bench) -> None:
    before = snapshot(bench.path / "results") | snapshot(bench.path / "reports")
    bench.edit("growth_interval: 1", "growth_interval: 0")
    assert_refused(bench.snakemake(), "config.yaml", "growth_interval: 0")
    assert snapshot(bench.path / "results") | snapshot(bench.path / "reports") == before


def test_a_repeated_key_in_a_given_config_file_is_refused(empty: Bench) -> None:
    other = empty.path / "other.yaml"
    other.write_text(CONFIG.replace("  second:", "  first:"), encoding="utf-8")
    finished = empty.snakemake("--configfile", "other.yaml")
    assert_refused(finished, "other.yaml", "'first' stands twice", "line 3", "line 4")
    assert_nothing_made(empty)


def test_a_given_config_file_replaces_the_one_in_the_folder(empty: Bench) -> None:
    text = CONFIG.replace("first:", "third:").replace("second:", "fourth:")
    (empty.path / "other.yaml").write_text(text, encoding="utf-8")
    planned = empty.plan("--configfile", "other.yaml").trains
    assert planned == trains("third", "fourth", *CONTROLS, PROBE)


def test_cuda_without_a_gpu_is_refused(empty: Bench) -> None:
    finished = empty.snakemake("--config", "device=cuda")
    assert_refused(finished, "device: 'cuda'", "no NVIDIA GPU", "write: device: auto")
    assert_nothing_made(empty)


def test_a_value_on_the_command_line_is_laid_over_the_file(empty: Bench) -> None:
    planned = empty.plan("--config", "seeds=[4]").trains
    assert planned == trains(*ARMS, PROBE, seed=4)


def test_a_bad_value_on_the_command_line_is_refused(empty: Bench) -> None:
    assert_refused(empty.snakemake("--config", "seeds=[-1]"), "seeds: ", "-1", "write: seeds:")
    assert_nothing_made(empty)


def test_a_crlf_config_means_the_same(bench: Bench) -> None:
    path = bench.path / "config.yaml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert not bench.plan().rules


def test_a_byte_order_mark_means_nothing(bench: Bench) -> None:
    path = bench.path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert not bench.plan().rules
