def whole_plan():
    """The plan and what its search has found; Snakemake waits for the search where it must."""
    if PLAN.search is not None:
        checkpoints.search.get()
    return JOBS.whole()
