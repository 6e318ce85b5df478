rule tables:
    input:
        runs=lambda wildcards: guard.list_run_files(whole_plan()),
        probes=guard.list_probe_files(PLAN),
        proposals=["results/search/proposals.json"] if PLAN.search else [],
        predictions="results/replay/predictions.csv",
        predicted_steps="results/replay/traces.parquet",
        seal="results/replay/seal.json",
    output:
        runs="results/tables/runs.csv",
        configurations=report(
            "results/tables/configurations.csv",
            caption="../report/configurations.rst",
            category="Tables",
        ),
        steps="results/tables/steps.parquet",
        probes="results/tables/probes.csv",
        exponents="results/tables/exponents.csv",
        windows="results/tables/windows.parquet",
        calibration="results/tables/calibration.csv",
        orphans="results/tables/orphans.json",
        plan="results/tables/plan.json",
    log:
        "results/logs/tables.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        plan=JOBS.plan_text,
        source=sources.source_digest(*sources.TABLES),
    shell:
        ": code {params.source}\n"
        "python -P -m halfscale tables --plan {params.plan:q}"
        ' --results "$(dirname "$(dirname {output.runs:q})")" > {log:q}'


rule verdict:
    input:
        runs="results/tables/runs.csv",
        plan="results/tables/plan.json",
    output:
        recommendation="reports/recommendation.json",
        settings=directory("reports/settings"),
    log:
        "results/logs/verdict.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        source=sources.source_digest(*sources.VERDICT),
    shell:
        ": code {params.source}\n"
        "python -P -m halfscale verdict --plan {input.plan:q} --runs {input.runs:q}"
        " --output {output.recommendation:q} --settings {output.settings:q} > {log:q}"
