#!/usr/bin/env bash
# The first README command in a fresh clone, on a small configuration; a second call has nothing to
# do; one edited configuration reruns its own seeds alone.
set -euo pipefail
source=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q "$source" "$folder/halfscale"
cd "$folder/halfscale"

venv=${VENV_FOR_CLONE:-$source/.venv}
job() { make --no-print-directory report VENV="$venv" ARGS="--configfile small.yaml $*" 2>&1; }

cp examples/small.yaml small.yaml
touch "$venv/.installed"
job | tail -n 3
test -s reports/summary.html
test -s reports/recommendation.json
job | grep -q "Nothing to be done"
sed -i 's/2\*\*24/2**23/' small.yaml
planned=$(job --dry-run)
test "$(grep -c "train workload=binary configuration=high-init seed=[01]$" <<<"$planned")" = 2
test "$(grep -c "train workload=" <<<"$planned")" = 2
echo "fresh clone: ok"
