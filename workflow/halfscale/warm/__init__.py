"""Warm workers: jobs that are forked from one process that has imported everything once.

A training job of a second pays about three for ``import torch`` and what its optimizers import.
While a workflow runs on this machine, one *parent* has paid that, and each job is a fork of it.

- `keeper` lives in Snakemake's process: it opens a private socket, starts the parent when the first
  job asks for it, and takes it along when Snakemake ends.
- `client` is what a job's command runs first: it hands its arguments, environment and output over
  and waits for the exit status. It imports nothing that takes time.
- `parent` imports everything, computes nothing, and forks a child for each client.

Whatever fails, the job's command does the work itself, in a cold process, and its log says so.
"""
