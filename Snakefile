"""halfscale: which loss-scaling settings should this model train with in fp16?"""

import sys
import time
from pathlib import Path
from snakemake.utils import min_version

min_version("9.0")
# Not workflow.basedir, which is another folder when this is used as a module.
FOLDER = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))
sys.path.insert(0, str(FOLDER / "workflow"))

from halfscale import guard, jobs, outdated, sources

PLAN = guard.load_plan(config, FOLDER, workflow.overwrite_configfiles)
FIGURES = guard.FIGURES
STARTED = time.time()

# A module's prefix goes before every relative path of a rule.
RESULTS = Path(workflow.modifier.path_modifier.modify("results"))
JOBS = jobs.Jobs(PLAN, RESULTS)

guard.prepare_jobs()
if workflow.is_main_process:
    guard.clear_stale_locks()
    outdated.reopen_failed(JOBS)
    outdated.reopen_predictions(JOBS)
    outdated.stop_if_outdated(JOBS)


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
    guard.hold_lock()


onsuccess:
    runs = len(list(JOBS.whole().run_keys()))
    print(f"{runs} runs on {PLAN.device}; open reports/summary.html")


onerror:
    print(*guard.describe_failures(Path("results/logs"), STARTED), sep="\n")
