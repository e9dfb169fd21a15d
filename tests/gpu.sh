#!/usr/bin/env bash
# What needs a GPU: the device tests, then the speed of both sides on it. Ends by itself within eight minutes.
# Logs and JSON go to $OUT if that is set. WINDOWS=1 makes it a quick trial, also on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}
export OMP_NUM_THREADS=1
timeout 200 python3 -m pytest -q -p no:cacheprovider -rs tests/test_contract.py -k "cuda or device or compiled" \
  > "$out/tests.log" 2>&1
tests=$?
timeout 260 python3 benchmark/speed.py --threads 1 --repetitions 1 --windows "${WINDOWS:-10}" --results-dir "$out/speed" \
  > "$out/speed.log" 2>&1
speed=$?
tail -n 3 "$out/tests.log"
tail -n 12 "$out/speed.log"
echo "tests $tests, speed $speed (0 is good), files in $out"
exit $((tests + speed))
