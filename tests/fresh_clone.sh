#!/usr/bin/env bash
# The README's commands in a fresh clone, on a small configuration; a second call has nothing to do;
# one edited configuration reruns its own seeds alone.
#
# PREPARED=1 (the default) takes the environment of this checkout; PREPARED=0 makes a new one, as the
# first command of the README does for a stranger.
set -euo pipefail
source=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q "$source" "$folder/halfscale"
cd "$folder/halfscale"

venv=.venv
if [ "${PREPARED:-1}" = 1 ]; then
  venv=$source/.venv
  touch "$venv/.installed"
fi
job() { make --no-print-directory report VENV="$venv" ARGS="--configfile small.yaml $*" 2>&1; }

cp examples/small.yaml small.yaml
job | tail -n 3
test -s reports/summary.html
test -s reports/recommendation.json
job | grep -q "Nothing to be done"
"$venv/bin/"snakemake --cores 4 --configfile examples/small.yaml 2>&1 | grep -q "Nothing to be done"
"$venv/bin/"halfscale check config.yaml
"$venv/bin/"halfscale check examples/policies.yaml
"$venv/bin/"halfscale check examples/own_model.yaml
"$venv/bin/"halfscale check-workload examples/own_model.py:build --set width=32
"$venv/bin/"halfscale probe examples/own_model.py:build --steps 200 -o probe.parquet
"$venv/bin/"halfscale replay probe.parquet --compare init_scale=65536,growth_interval=100
"$venv/bin/"halfscale replay results/probes/binary/*/probe.parquet >/dev/null
"$venv/bin/"halfscale simulate --policy torch --policy deepspeed --set init_scale=64 \
  --set growth_interval=2 --pattern FFXFF

sed -i 's/2\*\*24/2**23/' small.yaml
planned=$(job --dry-run)
test "$(grep -c "train workload=binary configuration=high-init seed=[01]$" <<<"$planned")" = 2
test "$(grep -c "train workload=" <<<"$planned")" = 2
echo "fresh clone: ok"
