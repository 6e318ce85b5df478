"""halfscale: which loss-scaling settings should this model train with in fp16?"""

import sys
from pathlib import Path
from snakemake.utils import min_version

min_version("9.0")
# Not workflow.basedir, which is another folder when this is used as a module.
FOLDER = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))
sys.path.insert(0, str(FOLDER / "workflow"))

from halfscale import cluster, guard, jobs, sources
from halfscale.warm import keeper

ELSEWHERE = cluster.may_run_elsewhere(workflow)
PLAN = guard.load_plan(config, FOLDER, workflow.overwrite_configfiles, ELSEWHERE)
FIGURES = guard.FIGURES

# A module's prefix goes before every relative path of a rule.
RESULTS = Path(workflow.modifier.path_modifier.modify("results"))
JOBS = jobs.Jobs(PLAN, RESULTS)

guard.prepare_jobs()
keeper.offer_worker(PLAN, workflow.is_main_process, workflow.resource_settings.cores)
if workflow.is_main_process:
    guard.check_results(JOBS)


rule all:
    default_target: True
    input:
        # Of all targets those that need not wait for the search.
        guard.list_first_targets(PLAN),
        lambda wildcards: guard.list_late_targets(whole_plan()),


include: "workflow/rules/common.smk"
include: "workflow/rules/verify.smk"
include: "workflow/rules/probe.smk"
include: "workflow/rules/search.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/replay.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/plots.smk"
include: "workflow/rules/report.smk"


onstart:
    cluster.prepare(PLAN, workflow)
    guard.hold_lock()
    guard.drop_rate_limit(workflow)


onsuccess:
    print(f"{JOBS.count_runs()} runs on {PLAN.device}; open reports/summary.html")


onerror:
    since = workflow.start_time.timestamp()
    print(*guard.describe_failures(Path("results/logs"), since), sep="\n")
