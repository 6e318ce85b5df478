rule predict:
    input:
        probes=[
            f"results/{probe.folder}/{file}"
            for probe in PLAN.probes()
            for file in (probe.record_name, probe.table_name)
        ],
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
        plan=PLAN.canonical_json(),
        source=sources.source_digest(*sources.PREDICTION),
    shell:
        ": code {params.source}\n"
        "python -P -m halfscale predict --plan {params.plan:q}"
        ' --results "$(dirname "$(dirname {output.predictions:q})")" > {log:q}'
