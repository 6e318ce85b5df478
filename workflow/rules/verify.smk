rule verify:
    output:
        checks=report(
            "results/verification/checks.csv",
            caption="../report/checks.rst",
            category="Verification",
        ),
        sweep="results/verification/sweep.csv",
    log:
        "results/logs/verify.log",
    # A failing check should be known before an hour of training.
    priority: 100
    conda:
        "../../envs/halfscale.yaml"
    params:
        source=sources.source_digest(*sources.VERIFICATION),
    shell:
        ": code {params.source}\n"
        'python -P -m halfscale verify --folder "$(dirname {output.checks:q})" > {log:q}'
