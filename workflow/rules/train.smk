rule train:
    output:
        # Not deleted before the job: if it fails, the old result stays whole.
        run=update("results/runs/{workload}/{arm}/seed{seed}/run.json"),
        trace=update("results/runs/{workload}/{arm}/seed{seed}/trace.parquet"),
    log:
        "results/logs/train/{workload}/{arm}/seed{seed}.log",
    wildcard_constraints:
        workload="[^/]+",
        arm="[^/]+",
        seed="[0-9]+",
    conda:
        "../../envs/halfscale.yaml"
    threads: PLAN.threads
    resources:
        **GPU,
        mem_mb=1024,
    # One canonical string: Snakemake compares params as a set of values without their names.
    params:
        spec=lambda wildcards: JOBS.run(
            wildcards.workload, wildcards.arm, int(wildcards.seed)
        ).text,
    message:
        "train workload={wildcards.workload} configuration={wildcards.arm} seed={wildcards.seed}"
    shell:
        "record={output.run:q}\n"
        "python -P -m halfscale train --spec {params.spec:q}"
        ' --folder "${{record%/*}}" > {log:q}'
