#!/bin/bash
# The whole workflow in one allocation, for many short runs. From halfscale's folder:
#   sbatch profiles/slurm/one-allocation.sh
# From another one with a config.yaml: add -s path/to/Snakefile at the end, with snakemake in PATH.
# More options of sbatch stand before the script's name, arguments of Snakemake after it.
#SBATCH --job-name=halfscale
#SBATCH --nodes=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --output=halfscale-%j.log
# A minute before the time is up Snakemake is told to end, as by Ctrl-C; the same sbatch goes on.
#SBATCH --signal=B:INT@60
PATH=$PWD/.venv/bin:$PATH

# In a process group of its own, since Slurm signals this shell alone, and Ctrl-C means the jobs too.
set -m
snakemake --cores "$SLURM_CPUS_PER_TASK" --resources "gpu=${SLURM_GPUS_ON_NODE:-0}" "$@" &
trap 'kill -INT -- "-$!"' INT TERM
wait "$!"
status=$?
# The signal ends the wait, not Snakemake; the second wait knows how Snakemake ended.
if [ "$status" -gt 128 ]; then
  wait "$!"
  status=$?
fi
exit "$status"
