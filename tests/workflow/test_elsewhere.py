"""The workflow in other folders, other homes and inside other workflows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from .driver import CONFIG, NOTHING, PREDICTORS, TARGETS, Bench, Planned, trains

MODULE = """\
configfile: "outer.yaml"


module halfscale:
    snakefile: {snakefile!r}
    config: config["halfscale"]
    prefix: "scaling"


use rule * from halfscale as halfscale_*
"""


def only_runs(bench: Bench, target: Path) -> None:
    """Put the runs and probes of the finished workflow, and nothing else of it, into a folder."""
    for kind in ("runs", "probes"):
        shutil.copytree(bench.path / "results" / kind, target / "results" / kind)


def test_directory_elsewhere_with_the_snakefile_named(bench: Bench, tmp_path: Path) -> None:
    caller = tmp_path / "caller"
    caller.mkdir()
    arguments = ("-s", str(bench.source / "Snakefile"), "--directory", "../work")
    assert bench.plan(*arguments, cwd=caller) == NOTHING
    bench.edit("256", "128")
    assert bench.plan(*arguments, cwd=caller) == Planned(trains("second"), PREDICTORS | {"train"})
    run = "results/runs/binary/second/seed0/run.json"
    finished = bench.snakemake(*arguments, run, cwd=caller)
    assert finished.code == 0, finished.text
    spec = json.loads((bench.path / run).read_text("utf-8"))["spec"]
    assert spec["policy"]["parameters"]["init_scale"] == 128
    assert not list(caller.iterdir())


def test_inside_the_clone_without_options(bench: Bench) -> None:
    source = bench.take_source()
    for name in ("results", "reports", ".snakemake", "config.yaml"):
        path = source / name
        if path.exists():
            path.unlink()
        (bench.path / name).rename(path)
    assert bench.plan("-s", "Snakefile", cwd=source) == NOTHING


def test_a_folder_with_spaces_quotes_and_other_letters(bench: Bench, tmp_path: Path) -> None:
    odd = tmp_path / """it's a "große" пример, naïve"""
    work = odd / "my 'work'"
    work.mkdir(parents=True)
    only_runs(bench, work)
    shutil.copytree(bench.source, odd / 'the "clone"')
    (work / "config.yaml").write_text(CONFIG, encoding="utf-8")
    there = Bench(work, odd / 'the "clone"')
    there.forget_runs("second")
    assert there.plan() == Planned(trains("second"), PREDICTORS | {"train", "verify"})
    there.make()
    assert all((work / target).stat().st_size for target in TARGETS)
    assert there.plan() == NOTHING


def decoy_kernel(data: Path) -> None:
    """A kernelspec named python3 that does not work."""
    folder = data / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def without_figures_and_page(bench: Bench) -> None:
    shutil.rmtree(bench.path / "results" / "plots")
    (bench.path / "reports" / "summary.html").unlink()


def test_an_unwritable_home_and_a_decoy_kernel(bench: Bench, tmp_path: Path) -> None:
    # A file, since root may write to any folder. Snakemake itself needs a cache folder.
    home = tmp_path / "home"
    home.write_text("", encoding="utf-8")
    decoy_kernel(tmp_path / "decoy")
    bench.environment |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JUPYTER_PATH": str(tmp_path / "decoy"),
    }
    without_figures_and_page(bench)
    bench.make()
    assert (bench.path / "reports" / "summary.html").exists()


def test_an_empty_home_stays_free_of_jupyter_and_a_decoy_in_it_is_not_used(
    bench: Bench, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    decoy_kernel(home / ".local" / "share" / "jupyter")
    bench.environment["HOME"] = str(home)
    (bench.path / "reports" / "summary.html").unlink()
    bench.make()
    assert (bench.path / "reports" / "summary.html").exists()
    made = {path.name for path in home.iterdir()}
    assert not made & {".jupyter", ".ipython", ".config"}


def test_files_of_the_user_do_not_shadow_modules(bench: Bench) -> None:
    for name in ("random.py", "torch.py", "plots.py", "halfscale.py"):
        (bench.path / name).write_text("raise SystemExit('shadowed')\n", encoding="utf-8")
    bench.forget_runs("second")
    bench.make("results/runs/binary/second/seed0/run.json", "results/tables/runs.csv")


def outer_workflow(bench: Bench, tmp_path: Path, config: str = CONFIG) -> Bench:
    """A workflow that uses halfscale as a module with a prefix, its runs already there."""
    path = tmp_path / "outer"
    path.mkdir()
    snakefile = str(bench.source / "Snakefile")
    (path / "Snakefile").write_text(MODULE.format(snakefile=snakefile), encoding="utf-8")
    block = re.sub("^", "  ", config, flags=re.MULTILINE)
    (path / "outer.yaml").write_text(f"1: not ours\nhalfscale:\n{block}", encoding="utf-8")
    only_runs(bench, path / "scaling")
    return Bench(path, path)


def test_as_a_module_with_a_prefix(bench: Bench, tmp_path: Path) -> None:
    outer = outer_workflow(bench, tmp_path)
    shutil.rmtree(outer.path / "scaling" / "results" / "runs" / "binary" / "second")
    outer.make()
    assert all((outer.path / "scaling" / target).stat().st_size for target in TARGETS)
    assert {path.name for path in outer.path.iterdir()} == {
        ".snakemake",
        "Snakefile",
        "outer.yaml",
        "scaling",
    }
    assert outer.plan() == NOTHING


def test_as_a_module_stale_results_without_records_are_named(bench: Bench, tmp_path: Path) -> None:
    outer = outer_workflow(bench, tmp_path, CONFIG.replace("65536", "32768"))
    stopped = outer.snakemake("-n")
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    assert complaint.endswith("rm -r scaling/results/runs/binary/first")


def test_as_a_module_a_bad_configuration_is_refused(bench: Bench, tmp_path: Path) -> None:
    outer = outer_workflow(bench, tmp_path, CONFIG.replace("init_scale: 256", "init_scal: 256"))
    stopped = outer.snakemake("-n")
    assert stopped.code != 0
    (complaint,) = stopped.complaints
    assert "configurations.second.init_scal: 256" in complaint
