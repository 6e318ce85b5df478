rule summary:
    input:
        tables=expand(
            "results/tables/{table}",
            table=[
                "runs.csv",
                "configurations.csv",
                "calibration.csv",
                "orphans.json",
                "plan.json",
            ],
        ),
        checks="results/verification/checks.csv",
        figures=expand(
            "results/plots/{figure}.{kind}", figure=FIGURES, kind=["svg", "txt"]
        ),
        recommendation="reports/recommendation.json",
    output:
        page="reports/summary.html",
        executed="reports/summary.ipynb",
    log:
        "results/logs/summary.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        source=sources.source_digest(*sources.REPORT),
        notebook_digest=sources.file_digest(sources.NOTEBOOK),
        results=lambda wildcards, input: Path(input.checks).parents[1],
        attempt=lambda wildcards, input: Path(input.checks).parents[1]
        / "logs"
        / "summary.ipynb",
    shell:
        ": code {params.source} {params.notebook_digest}\n"
        "python -P -m halfscale report --results {params.results:q}"
        " --recommendation {input.recommendation:q} --executed {output.executed:q}"
        " --page {output.page:q} --attempt {params.attempt:q} > {log:q}"
