"""``halfscale``: one subcommand a rule; each also runs by hand.

What a command does goes to standard output (the job's log), the one line that says why it failed
to standard error (the terminal).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfscale import __version__, quick
from halfscale.config import read_config
from halfscale.guard import OWNER
from halfscale.packing import unpack

if TYPE_CHECKING:
    from halfscale.records import JobRecord

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

SpecOption = Annotated[str, typer.Option(help="The run's specification, as canonical JSON.")]
PlanOption = Annotated[
    str, typer.Option(help="The plan, as canonical JSON; packed if long.", parser=unpack)
]
ResultsOption = Annotated[Path, typer.Option(help="The results folder.")]


class CheckFailed(RuntimeError):
    """A verification check did not hold."""


def _job(function: Callable[..., None], hidden: bool = False) -> Callable[..., None]:
    """Register a rule's subcommand: it ends with its owner and fails with one line on the terminal.

    The traceback goes to the log, and the line stands there last as well.
    """

    @wraps(function)
    def run(*args: Any, **keywords: Any) -> None:
        _end_with_owner()
        try:
            function(*args, **keywords)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            name = function.__name__.replace("_", "-")
            line = f"halfscale {name} failed: {describe_subject(keywords)}{text}"
            print(line, flush=True)
            print(line, file=sys.stderr)
            raise typer.Exit(1) from None

    return app.command(hidden=hidden)(run)


def _by_hand(function: Callable[..., None]) -> Callable[..., None]:
    """Register a subcommand for the terminal: what cannot be done is said in one line."""

    @wraps(function)
    def run(*args: Any, **keywords: Any) -> None:
        try:
            function(*args, **keywords)
        except (ValueError, OSError) as error:
            name = function.__name__.replace("_", "-")
            print(f"halfscale {name}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None

    return app.command()(run)


def describe_subject(keywords: dict[str, Any]) -> str:
    """Which run a command was about, for its error line."""
    try:
        spec = json.loads(keywords["spec"])
        arm = f"configuration={spec['arm']}" if "arm" in spec else "probe"
        return f"workload={spec['workload']} {arm} seed={spec['seed']}: "
    except (KeyError, ValueError, TypeError):
        return ""


def _end_with_owner() -> None:
    """End this process when the workflow that started it is gone, however it went."""
    owner = os.environ.get(OWNER)
    if not owner or not owner.isdigit():
        return

    def watch() -> None:
        import psutil

        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(owner))
            # A process that was killed stays a zombie until its parent asks for it.
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        print(f"the workflow (process {owner}) is gone; ending", flush=True)
        os._exit(75)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def _own_gpu(device: str) -> AbstractContextManager[object]:
    """While it is open, a job on a GPU has one of its own."""
    if device != "cuda":
        return nullcontext()
    from halfscale.gpus import hold_gpu

    return hold_gpu(say=lambda line: print(line, flush=True))


def _print_end(record: JobRecord) -> None:
    if record.gpu:
        print(f"gpu: {record.gpu}")
    print(f"outcome: {record.outcome}" + (f" ({record.error})" if record.error else ""))


@_by_hand
def check(config: Annotated[Path, typer.Argument(help="A configuration file.")]) -> None:
    """Check a configuration file and say what it would run."""
    from halfscale.devices import count_gpus
    from halfscale.planner import build_plan

    # The file may be for a cluster, and this its login node.
    plan = build_plan(read_config(config), str(config), elsewhere=True)
    runs, probes = len(list(plan.runs())), len(list(plan.probes()))
    print(
        f"{config}: {runs} runs on {plan.device}: {', '.join(sorted(plan.workloads))} × "
        f"{', '.join(plan.arms)} × seeds {', '.join(map(str, plan.seeds))}"
    )
    more = plan.search.proposals * probes if plan.search else 0
    print(f"beside them {probes} probes, and up to {more} runs of what the search finds")
    if plan.device == "cuda" and not count_gpus():
        print("this machine has no GPU that torch can use; they can only run on a cluster's")


@_by_hand
def check_workload(
    entry: Annotated[str, typer.Argument(help="path/to/file.py:build or package.module:build")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, a parameter of build.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Try a model of your own: three steps in fp32, bf16 and fp16, and what to write."""
    from halfscale.tryout import check_workload as try_out

    print(try_out(entry, settings or [], device))


@_job
def verify(
    folder: Annotated[Path, typer.Option(help="Where checks.csv and sweep.csv go.")],
) -> None:
    """Check the hand-written gradient scaler; fail if one check does not hold."""
    import pandas as pd

    from halfscale.records import write_text
    from halfscale.verify import run_checks, sweep_scales

    sweep = sweep_scales()
    checks = []
    for check in run_checks(sweep):
        checks.append(check)
        print(
            f"{'pass' if check.passed else 'FAIL'}  {check.name}\n"
            f"      measured: {check.measured}\n      expected: {check.expected}",
            flush=True,
        )
    failed = [check for check in checks if not check.passed]
    if failed:
        raise CheckFailed(
            f"check '{failed[0].name}': measured {failed[0].measured}; "
            f"expected {failed[0].expected} ({len(failed)} of {len(checks)} checks failed)"
        )
    write_text(folder / "sweep.csv", pd.DataFrame(sweep).to_csv(index=False))
    rows = pd.DataFrame([check.as_row() for check in checks])
    write_text(folder / "checks.csv", rows.to_csv(index=False))


@_job
def train(
    spec: SpecOption,
    folder: Annotated[Path, typer.Option(help="Where trace.parquet and run.json go.")],
) -> None:
    """Train one run and record every step."""
    from halfscale.plan import RunSpec

    run_spec = RunSpec.model_validate_json(spec)
    print(f"train {run_spec} ({run_spec.digest})", flush=True)
    from halfscale.train import train as train_run

    with _own_gpu(run_spec.device):
        record = train_run(run_spec, folder, lambda line: print(line, flush=True))
    _print_end(record)


@partial(_job, hidden=True)
def probe_job(
    spec: SpecOption,
    folder: Annotated[Path, typer.Option(help="Where probe.parquet and probe.json go.")],
) -> None:
    """Train one reference run and count the magnitudes of its gradients."""
    from halfscale.plan import ProbeSpec

    probe_spec = ProbeSpec.model_validate_json(spec)
    print(f"probe {probe_spec} ({probe_spec.digest})", flush=True)
    from halfscale.probe import probe as run_probe

    with _own_gpu(probe_spec.device):
        record = run_probe(probe_spec, folder, lambda line: print(line, flush=True))
    _print_end(record)


@_job
def search(plan: PlanOption, results: ResultsOption) -> None:
    """Replay a grid of configurations over the probes and propose the best for training."""
    from halfscale.plan import Plan
    from halfscale.search import search as search_grid

    found = search_grid(Plan.model_validate_json(plan), results)
    print(f"{found.tried} configurations replayed. {found.objective}")
    for number, proposal in enumerate(found.proposals, start=1):
        print(f"found-{number}: {proposal.choice.policy} {proposal.choice.parameters}")
        print(f"  predicted to lose {proposal.cost:.2%} of the steps; {proposal.alike} act alike")
    for probe in found.unused:
        print(f"not looked at: the probe of {probe}")
    for name, cost in found.listed.items():
        print(f"{name}: predicted to lose {cost:.2%} of the steps")


@_job
def predict(plan: PlanOption, results: ResultsOption) -> None:
    """Replay every configuration of the plan over its probes and write what is predicted."""
    from halfscale.plan import Plan
    from halfscale.predict import write_predictions
    from halfscale.proposals import extend_plan

    whole = extend_plan(Plan.model_validate_json(plan), results)
    predicted = write_predictions(whole, results)
    for name, table in predicted.items():
        print(f"{name}: {len(table)} rows")


@_job
def tables(plan: PlanOption, results: ResultsOption) -> None:
    """Check and read every run of the plan and write the tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from halfscale.calibration import calibrate, read_replay
    from halfscale.plan import Plan
    from halfscale.probe_tables import collect_probes
    from halfscale.proposals import extend_plan
    from halfscale.records import write_atomically, write_text
    from halfscale.tables import collect_runs, find_orphans, summarise

    checked = extend_plan(Plan.model_validate_json(plan), results)
    runs, steps = collect_runs(checked, results)
    exponents, windows, probes = collect_probes(checked, results)
    orphans = find_orphans(checked, results)
    folder = results / "tables"
    for name, frame in {
        "runs": runs,
        "configurations": summarise(runs),
        "probes": probes,
        "exponents": exponents,
        "calibration": calibrate(runs, steps, *read_replay(checked, results)),
    }.items():
        write_text(folder / f"{name}.csv", frame.to_csv(index=False))
    for name, frame in {"steps": steps, "windows": windows}.items():
        table = pa.Table.from_pandas(frame, preserve_index=False)
        write_atomically(folder / f"{name}.parquet", partial(pq.write_table, table))
    write_text(folder / "orphans.json", json.dumps(orphans, indent=1) + "\n")
    write_text(folder / "plan.json", checked.canonical_json() + "\n")
    print(f"{len(runs)} runs: {runs['outcome'].value_counts().to_dict()}")
    for path in orphans:
        print(f"orphan: {results / path} is not in the configuration any more; it is not used")


@_job
def verdict(
    plan: Annotated[Path, typer.Option(help="The plan's file beside the tables.")],
    runs: Annotated[Path, typer.Option(help="The table of runs.")],
    output: Annotated[Path, typer.Option(help="recommendation.json")],
    settings: Annotated[Path, typer.Option(help="Folder for the settings of each tool.")],
) -> None:
    """Name the recommended configuration, or say that there is no winner."""
    import pandas as pd

    from halfscale.export import build_recommendation
    from halfscale.plan import Plan
    from halfscale.records import write_json, write_text
    from halfscale.settings import express, write_settings
    from halfscale.verdict import decide

    checked = Plan.model_validate_json(plan.read_text(encoding="utf-8"))
    table = pd.read_csv(runs)
    decided = decide(table, checked.configurations)
    if decided.recommended:
        choice = checked.configurations[decided.recommended]
        write_settings(express(choice.policy, choice.parameters, checked.device), settings)
    else:
        write_text(settings / "settings.md", f"{decided.sentence} There are no settings.\n")
    # Last: a folder that is there need not be whole, where failed jobs keep what they wrote.
    write_json(output, build_recommendation(checked, table, decided))
    print(decided.sentence)


@_job
def plots(
    results: ResultsOption,
    recommendation: Annotated[Path, typer.Option(help="recommendation.json")],
) -> None:
    """Draw every figure and write its text alternative."""
    import pandas as pd

    from halfscale.evidence import Evidence
    from halfscale.plan import Plan
    from halfscale.plots import draw_all
    from halfscale.replay_seal import check_replay

    plan = Plan.model_validate_json((results / "tables" / "plan.json").read_text(encoding="utf-8"))
    (landscape,) = check_replay(plan, results, "landscape.csv")
    evidence = Evidence(
        runs=pd.read_csv(results / "tables" / "runs.csv"),
        configurations=pd.read_csv(results / "tables" / "configurations.csv"),
        steps=pd.read_parquet(results / "tables" / "steps.parquet"),
        sweep=pd.read_csv(results / "verification" / "sweep.csv"),
        exponents=pd.read_csv(results / "tables" / "exponents.csv"),
        windows=pd.read_parquet(results / "tables" / "windows.parquet"),
        calibration=pd.read_csv(results / "tables" / "calibration.csv"),
        landscape=pd.read_csv(landscape),
        choices=plan.configurations,
        recommendation=json.loads(recommendation.read_text(encoding="utf-8")),
    )
    draw_all(evidence, results / "plots")


@_job
def report(
    results: ResultsOption,
    recommendation: Annotated[Path, typer.Option(help="recommendation.json")],
    executed: Annotated[Path, typer.Option(help="The executed notebook.")],
    page: Annotated[Path, typer.Option(help="The page.")],
    attempt: Annotated[Path, typer.Option(help="The executed part, kept if a cell fails.")],
) -> None:
    """Execute the report notebook and write it as one HTML page."""
    from halfscale.report import execute_notebook, render_page
    from halfscale.sources import NOTEBOOK

    page.unlink(missing_ok=True)
    parameters = {"results": str(results), "recommendation": str(recommendation)}
    execute_notebook(NOTEBOOK, executed, attempt, parameters)
    render_page(executed, page)
    print(f"{page}: {page.stat().st_size / 1e6:.2f} MB")


@_by_hand
def simulate(
    policy: Annotated[list[str], typer.Option(help="A policy; give several to compare them.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, or policy.key=value for one of several policies."),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="F for a finite step, X for an overflow, such as FFXFF.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded run: its folder or its trace.parquet.")
    ] = None,
    largest_gradient: Annotated[
        float | None, typer.Option(help="Largest unscaled gradient, for policies that use it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole state at each step.")] = False,
) -> None:
    """Print the scale after each step of a pattern, as a policy would have moved it."""
    from halfscale.simulate import parse_pattern, read_trace, short, side_by_side, simulate_all

    if (pattern is None) == (trace is None):
        raise ValueError("give either --pattern, such as --pattern FFXFF, or --trace")
    steps = read_trace(trace) if trace else parse_pattern(pattern or "", largest_gradient)
    simulations = simulate_all(policy, settings or [], steps)
    if as_json:
        print(json.dumps({s.name: {"states": s.states, "ended": s.ended} for s in simulations}))
    elif len(simulations) == 1:
        print(*map(short, simulations[0].scales))
    else:
        print(side_by_side(simulations, steps))
    for simulation in simulations:
        if simulation.ended:
            print(f"{simulation.name} gave up in {simulation.ended}", file=sys.stderr)


_by_hand(quick.probe)
_by_hand(quick.replay)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Find, with evidence, the loss-scaling settings a model should train with in fp16."""
    if version:
        print(__version__)
        raise typer.Exit


if __name__ == "__main__":
    app()
