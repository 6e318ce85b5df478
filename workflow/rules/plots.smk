rule plots:
    input:
        tables=expand(
            "results/tables/{table}",
            table=[
                "runs.csv",
                "configurations.csv",
                "steps.parquet",
                "exponents.csv",
                "windows.parquet",
                "calibration.csv",
                "plan.json",
            ],
        ),
        landscape="results/replay/landscape.csv",
        seal="results/replay/seal.json",
        sweep="results/verification/sweep.csv",
        recommendation="reports/recommendation.json",
    output:
        figures=report(
            expand("results/plots/{figure}.svg", figure=FIGURES),
            caption="../report/figures.rst",
            category="Figures",
        ),
        texts=expand("results/plots/{figure}.txt", figure=FIGURES),
    log:
        "results/logs/plots.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        source=sources.source_digest(*sources.PLOTS),
        results=lambda wildcards, input: Path(input.sweep).parents[1],
    shell:
        ": code {params.source}\n"
        "python -P -m halfscale plots --results {params.results:q}"
        " --recommendation {input.recommendation:q} > {log:q}"
