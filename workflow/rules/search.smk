checkpoint search:
    input:
        probes=guard.list_probe_files(PLAN),
    output:
        proposals="results/search/proposals.json",
    log:
        "results/logs/search.log",
    localrule: True
    conda:
        "../../envs/halfscale.yaml"
    params:
        plan=JOBS.plan_text,
        results=lambda wildcards, output: Path(output.proposals).parents[1],
    shell:
        "python -P -m halfscale search --plan {params.plan:q}"
        " --results {params.results:q} > {log:q}"
