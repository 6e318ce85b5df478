rule probe:
    output:
        # Not deleted before the job: if it fails, the old result stays whole.
        record=update("results/probes/{workload}/seed{seed}/probe.json"),
        counts=update("results/probes/{workload}/seed{seed}/probe.parquet"),
    log:
        "results/logs/probe/{workload}/seed{seed}.log",
    wildcard_constraints:
        workload="[^/]+",
        seed="[0-9]+",
    conda:
        "../../envs/halfscale.yaml"
    threads: PLAN.threads
    resources:
        **GPU,
        mem_mb=1024,
    # One canonical string: Snakemake compares params as a set of values without their names.
    params:
        spec=lambda wildcards: JOBS.probe(wildcards.workload, int(wildcards.seed)).text,
    message:
        "probe workload={wildcards.workload} seed={wildcards.seed}"
    shell:
        "record={output.record:q}\n"
        "python -P -m halfscale probe-job --spec {params.spec:q}"
        ' --folder "${{record%/*}}" > {log:q}'
