"""The commands of the quick way: probe a model, replay settings over it or over a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, a parameter of build.")
]


def probe(
    workload: Annotated[
        str, typer.Argument(help="path/to/file.py:build, package.module:build or a built-in name.")
    ],
    steps: Annotated[str, typer.Option(help="How many steps to train.")] = "500",
    output: Annotated[Path, typer.Option("--output", "-o", help="The one file to write.")] = Path(
        "probe.parquet"
    ),
    settings: Settings = None,
    seed: Annotated[str, typer.Option(help="What the training is built from.")] = "0",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[str, typer.Option(help="CPU threads.")] = "1",
) -> None:
    """Record what every scale would do to a model: one training in bf16, into one file."""
    from halfscale.probing import plan_probe, probe_by_hand, summarise_probe

    spec = plan_probe(
        workload, settings or [], steps=steps, seed=seed, device=device, threads=threads
    )
    print(f"probe {spec}: {spec.steps} steps on {spec.device}", flush=True)
    file = probe_by_hand(spec, output, lambda line: print(line, flush=True))
    print(f"\n{summarise_probe(file)}")


def replay(
    probes: Annotated[
        list[Path] | None, typer.Argument(help="Probes; several are seeds of one training.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Instead: a training's own log, step,scale,overflow.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; several are allowed.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="key=value,value or key=from..to*factor; once for each parameter."),
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="A configuration: key=value,key=value.")
    ] = None,
    top: Annotated[str, typer.Option(help="How many to show.")] = "10",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Rank scaler settings by what they would have done, without training any of them."""
    from halfscale.config import parse_whole

    if bool(probes) == bool(log):
        raise ValueError(
            "give either probes, such as halfscale replay probe.parquet, or a log: --log run.csv"
        )
    try:
        shown = parse_whole(top, 1, 1000)
    except ValueError as error:
        raise ValueError(f"--top {top}: {error}; write --top 10") from None
    if log:
        _replay_log(log, policy or [], grid or [], compare or [], shown, as_json)
        return
    from halfscale.replaying import compare as compare_over
    from halfscale.replaying import comparison_as_json, describe_comparison

    comparison = compare_over(probes or [], policy or [], grid or [], compare or [])
    if as_json:
        print(json.dumps(comparison_as_json(comparison, shown), allow_nan=False))
    else:
        print(describe_comparison(comparison, shown))


def _replay_log(
    path: Path, policies: list[str], ranges: list[str], compared: list[str], top: int, as_json: bool
) -> None:
    from halfscale.logs import describe_log, examine, log_as_json

    if set(policies) - {"torch"}:
        raise ValueError("--policy: a log is replayed with policy torch alone; leave it out")
    report = examine(path, ranges, compared, top)
    if as_json:
        print(json.dumps(log_as_json(report), allow_nan=False))
    else:
        print(describe_log(report))
