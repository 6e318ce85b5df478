# Not gpu=0 on a CPU: the Kubernetes executor takes any gpu for a request, and wants its maker.
GPU = {"gpu": 1, "gpu_manufacturer": "nvidia"} if PLAN.device == "cuda" else {}


def whole_plan():
    """The plan and what its search has found; Snakemake waits for the search where it must."""
    if PLAN.search is not None:
        checkpoints.search.get()
    return JOBS.whole()
