checkpoint search:
    input:
        probes=[
            f"results/{probe.folder}/{file}"
            for probe in PLAN.probes()
            for file in (probe.record_name, probe.table_name)
        ],
    output:
        proposals="results/search/proposals.json",
    log:
        "results/logs/search.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        plan=PLAN.canonical_json(),
        results=lambda wildcards, output: Path(output.proposals).parents[1],
    shell:
        "python -P -m halfscale search --plan {params.plan:q}"
        " --results {params.results:q} > {log:q}"
