#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than ten minutes: build, GPU tests, memory checks, benchmarks.
#
#   tests/gpu/run.sh [--dry-run] [--skip-build]
#
# --dry-run runs on the CPU what can run there, to see that this script and the tests work. --skip-build takes the extension
# that is there. Installs nothing. From the environment: PYTHON (python3), OUT (build/gpu-results: a few files with all
# results), RUN_LIMIT_S (570), TORCHDDP_TEST_NCCL (an NCCL 2.30 or newer for two ranks on one GPU), TORCHDDP_COMMIT (where the
# tree has no history). A failed step does not stop the next; the table comes last; the exit status is 0 if nothing failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
exec </dev/null

dry_run=false
build=true
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=true ;;
    --skip-build) build=false ;;
    *)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 2
      ;;
  esac
done

python=$(command -v "${PYTHON:-python3}") || { echo "run.sh: '${PYTHON:-python3}' was not found; set PYTHON."; exit 2; }
out=${OUT:-build/gpu-results}
limit_s=${RUN_LIMIT_S:-570}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/torchddp-gpu.XXXXXX") || exit 2
trap 'rm -rf "$work"' EXIT
mkdir "$work/xml" "$work/plots"

export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
PATH=$("$python" tests/gpu/environment.py --tool-path):$PATH
export PATH
if $dry_run; then export TORCHDDP_TEST_DEVICE=cpu; fi

table=()
any_failed=0

row() {
  table+=("$(printf '%-26s %-8s %5s s  %s' "$1" "$2" "$3" "$4")")
  write_results # as far as they are: what ends this script from outside takes nothing away
}
skip() { row "$1" skipped 0 "$2"; }
log_of() { echo "$work/$1.log"; }

write_results() {
  local log name
  for log in "$work"/*.log; do
    printf '=== %s\n' "$(basename "$log" .log)"
    cat "$log"
  done >"$out/logs.txt"
  {
    for name in benchmarks_two_ranks benchmarks; do
      # The tables, without what the profiler says of itself.
      if [ -e "$(log_of "$name")" ]; then grep -v '^USDT:' "$(log_of "$name")"; fi
    done
    printf '\n'
    "$python" tests/gpu/summary.py merge "$work/xml" "$out/tests.xml"
    printf '\n'
    cat "$(log_of environment)"
    if $dry_run; then printf '\nDry run on the CPU: nothing here was shown on a GPU.\n'; else printf '\n'; fi
    printf '%s\n' "${table[@]}"
  } >"$out/summary.txt"
}

# The time that a step has, which ends at this many hundredths of the whole run: what a step leaves, the next ones have.
left_s() { echo $((limit_s * $1 / 100 - SECONDS)); }

# step NAME SHARE COMMAND...: its output goes to a log, whose end is shown if it fails. Returns its exit status.
step() {
  local name=$1 share=$2 status=0 began=$SECONDS limit note=
  shift 2
  limit=$(left_s "$share")
  # No step may take what all before it have left.
  if [ "$limit" -gt $((limit_s * 35 / 100)) ]; then limit=$((limit_s * 35 / 100)); fi
  if [ "$limit" -lt 3 ]; then
    row "$name" FAILED 0 "not run: no time left"
    any_failed=1
    return 1
  fi
  echo "--- $name (at most $limit s): $*"
  timeout --kill-after=10 "$limit" "$@" >"$(log_of "$name")" 2>&1 || status=$?
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then note="stopped after $limit s"; fi
  if [ -e "$work/xml/$name.xml" ]; then note="$note $("$python" tests/gpu/summary.py count "$work/xml/$name.xml")"; fi
  if [ "$status" -eq 0 ]; then
    row "$name" ok $((SECONDS - began)) "${note# }"
  else
    any_failed=1
    row "$name" FAILED $((SECONDS - began)) "${note:-exit status $status}"
    tail -n 25 "$(log_of "$name")"
  fi
  return "$status"
}

# The thread method, for a test may hang where no Python code runs.
pytest=("$python" -m pytest -q -p no:cacheprovider -o timeout_method=thread --timeout=100)

build_extension() {
  local options=()
  if command -v ninja >/dev/null; then options+=(-G Ninja); else options+=(-G "Unix Makefiles"); fi
  if $dry_run; then
    options+=(-DTORCHDDP_CUDA=OFF)
  else
    # For the GPU that is there only.
    options+=(-DTORCHDDP_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$("$python" tests/gpu/environment.py --architecture)")
  fi
  step configure 20 cmake -S . -B build/gpu -DTORCHDDP_PYTHON="$python" "${options[@]}" &&
    step build 45 cmake --build build/gpu --parallel "$(nproc)"
}

# run_tests SHARE NAME...: a process each, for what one of them leaves broken on the device, the others do not see.
run_tests() {
  local share=$1 name
  shift
  for name in "$@"; do
    step "$name" "$share" "${pytest[@]}" --junitxml="$work/xml/$name.xml" "tests/gpu/$name.py"
  done
}

# Without torch's cache of memory each tensor is an allocation of its own, and a write beside it is seen.
check_memory() {
  local tool=$1 share=$2
  if $dry_run; then
    skip "$tool" "dry run"
  elif ! command -v compute-sanitizer >/dev/null; then
    skip "$tool" "compute-sanitizer is not installed"
  else
    step "$tool" "$share" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" tests/gpu/test_pack_gpu.py
  fi
}

run_benchmarks() {
  local seconds where=()
  if $dry_run; then
    where=(--device cpu --backend gloo --quick)
    seconds=1
  else
    # Starting, building models and counting kernels come on top.
    seconds=$(($(left_s 75) - 45))
    if [ "$seconds" -gt 120 ]; then seconds=120; elif [ "$seconds" -lt 10 ]; then seconds=10; fi
  fi
  step benchmarks 75 "$python" -m benchmarks.gpu "${where[@]}" --seconds "$seconds" \
    --json "$out/bench.json" --out "$work/plots"
  cp "$work"/plots/*.png "$out" 2>/dev/null
}

run_benchmarks_of_two_ranks() {
  local seconds=8 where=(--backend gloo)
  if $dry_run; then
    where=(--device cpu --backend gloo --quick)
    seconds=1
  fi
  step benchmarks_two_ranks 100 "$python" -m benchmarks.gpu "${where[@]}" --world-size 2 \
    --model resnet50 --seconds "$seconds" --json "$out/bench_two_ranks.json"
}

checks=()
if $dry_run; then checks+=(--cpu); fi
if ! $build; then checks+=(--no-build); fi
if ! step environment 10 "$python" tests/gpu/environment.py "${checks[@]}"; then
  cp "$(log_of environment)" "$out/environment.txt"
  exit 2
fi
cp "$(log_of environment)" "$out/environment.txt"

# In the order of what is worth most.
if ! $build || build_extension; then
  run_tests 60 test_pack_gpu test_parity test_streams test_graph test_profile
  run_benchmarks
  run_tests 90 test_two_ranks_gloo test_two_ranks_nccl test_sharded
  check_memory memcheck 95
  check_memory racecheck 97
  run_benchmarks_of_two_ranks
fi

cat "$out/summary.txt"
if [ "$any_failed" -eq 0 ]; then echo "all ok, results in $out"; else echo "something FAILED, results in $out"; fi
exit "$any_failed"
