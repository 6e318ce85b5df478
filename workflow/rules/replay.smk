rule predict:
    input:
        probes=guard.list_probe_files(PLAN),
        proposals=["results/search/proposals.json"] if PLAN.search else [],
    output:
        predictions="results/replay/predictions.csv",
        traces="results/replay/traces.parquet",
        landscape="results/replay/landscape.csv",
        seal="results/replay/seal.json",
    log:
        "results/logs/predict.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        plan=JOBS.plan_text,
        source=sources.source_digest(*sources.PREDICTION),
    shell:
        ": code {params.source}\n"
        "python -P -m halfscale predict --plan {params.plan:q}"
        ' --results "$(dirname "$(dirname {output.predictions:q})")" > {log:q}'
