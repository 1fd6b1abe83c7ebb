#!/usr/bin/env bash
# Everything that needs a GPU: build, GPU tests, two ranks on one GPU, memory checks, benchmarks.
#
#   tests/gpu/run.sh [--dry-run] [--skip-build] [--only STAGE[,STAGE]...]
#
# --dry-run runs everything possible on the CPU, to check this script and the tests. --skip-build uses the existing extension.
# --only takes stages or the groups tests, two_ranks and benchmarks. On one machine, three calls give each group the whole time:
#
#   tests/gpu/run.sh --only tests
#   tests/gpu/run.sh --only two_ranks --skip-build
#   tests/gpu/run.sh --only benchmarks --skip-build
#
# Installs nothing. Environment variables, with defaults: PYTHON (python3), OUT (build/gpu-results: at most eight files with all
# results), RUN_LIMIT_S (570), TORCHDDP_TEST_NCCL (NCCL 2.30 or newer, for two ranks on one GPU: the library, or a folder with
# its parts), TORCHDDP_COMMIT (for a tree without git history). A failed step does not stop the next; the table comes last; the
# exit status is 0 if nothing failed. If the script is stopped, OUT holds the results so far.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
exec </dev/null

# The stages in the order in which they run, the most valuable first, with their shares of the time.
stages=(
  test_pack_gpu 4 test_parity 12 test_streams 5 test_graph 4 test_profile 4
  bench 12
  test_two_ranks_nccl 24
  memcheck 4 initcheck 4
  bench_rows 5 test_two_ranks_gloo 3 test_sharded 4 bench_two_ranks 2
)
declare -A groups=(
  [tests]="test_pack_gpu test_parity test_streams test_graph test_profile test_sharded memcheck initcheck"
  [two_ranks]="test_two_ranks_nccl test_two_ranks_gloo"
  [benchmarks]="bench bench_rows bench_two_ranks"
)

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d'
  exit 2
}

dry_run=false
build=true
only=
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=true ;;
    --skip-build) build=false ;;
    --only)
      only=${2:-}
      [ -n "$only" ] || usage
      shift
      ;;
    *) usage ;;
  esac
  shift
done

all_stages=" "
for ((i = 0; i < ${#stages[@]}; i += 2)); do all_stages+="${stages[i]} "; done
chosen=" "
for name in ${only//,/ }; do
  if [[ -z "${groups[$name]:-}" && $all_stages != *" $name "* ]]; then
    echo "run.sh: there is no stage '$name'. Groups: ${!groups[*]}. Stages:$all_stages"
    exit 2
  fi
  chosen+="${groups[$name]:-$name} "
done
[ -n "$only" ] || chosen=$all_stages

python=$(command -v "${PYTHON:-python3}") || { echo "run.sh: '${PYTHON:-python3}' was not found; set PYTHON."; exit 2; }
out=${OUT:-build/gpu-results}
limit_s=${RUN_LIMIT_S:-570}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/torchddp-gpu.XXXXXX") || exit 2
trap 'rm -rf "$work"' EXIT
mkdir "$work/xml" "$work/plots"

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc would obey these variables
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
# Some of the answers need torch, which may take long to import, or forever on a broken driver.
ask() { timeout --kill-after=5 "$environment_s" "$python" tests/gpu/environment.py "$@"; }
environment_s=120
PATH=$(ask --tool-path):$PATH
export PATH
if $dry_run; then export TORCHDDP_TEST_DEVICE=cpu; fi

# plan: shares out the time that is left among the steps that will run. A step may use what earlier ones left.
declare -A ends_at share_of
plan() {
  local steps=() i total=0 sum=0
  if $build; then steps+=(configure 3 build 10); fi
  for ((i = 0; i < ${#stages[@]}; i += 2)); do
    if [[ $chosen == *" ${stages[i]} "* ]]; then steps+=("${stages[i]}" "${stages[i + 1]}"); fi
  done
  for ((i = 1; i < ${#steps[@]}; i += 2)); do total=$((total + steps[i])); done
  for ((i = 0; i < ${#steps[@]}; i += 2)); do
    sum=$((sum + steps[i + 1]))
    ends_at[${steps[i]}]=$((SECONDS + (limit_s - SECONDS) * sum / total))
    share_of[${steps[i]}]=$((100 * steps[i + 1] / total))
  done
}

table=()
any_failed=0
running= # the process of the current step
step=

row() {
  table+=("$(printf '%-26s %-8s %5s s  %s' "$1" "$2" "$3" "$4")")
  write_results # after each step, so that nothing is lost if the script is killed
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
    for name in bench_two_ranks bench_rows bench; do
      # The tables, without the profiler's own messages.
      if [ -e "$(log_of "$name")" ]; then grep -v '^USDT:' "$(log_of "$name")"; fi
    done
    printf '\n'
    "$python" tests/gpu/summary.py merge "$work/xml" "$out/tests.xml"
    printf '\n'
    cat "$(log_of environment)"
    if $dry_run; then printf '\nDry run on the CPU: nothing here ran on a GPU.\n'; else printf '\n'; fi
    printf '%s\n' "${table[@]}"
  } >"$out/summary.txt"
}

# A step's seconds: its share plus the unused time of earlier steps, but no more than 35 percent of the run or its own share.
seconds_of() {
  local seconds most=${share_of[$1]:-0}
  seconds=$((${ends_at[$1]:-$environment_s} - SECONDS))
  most=$((limit_s * (most > 35 ? most : 35) / 100))
  echo $((seconds < most ? seconds : most))
}

# step NAME COMMAND...: output goes to running.txt, then to a log; its tail is shown on failure. Returns the exit status.
step() {
  local name=$1 status=0 began=$SECONDS limit note=
  shift
  limit=$(seconds_of "$name")
  if [ "$limit" -lt 3 ]; then
    any_failed=1
    row "$name" FAILED 0 "not run: no time left"
    return 1
  fi
  echo "--- $name (at most $limit s): $*"
  step=$name
  timeout --kill-after=30 "$limit" "$@" >"$out/running.txt" 2>&1 &
  running=$!
  wait "$running" || status=$? # not in the foreground, where bash would delay signal handlers
  running=
  mv "$out/running.txt" "$(log_of "$name")"
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

stop() {
  echo "run.sh: interrupted after $SECONDS s; the results so far are in $out"
  if [ -n "$running" ]; then
    kill "$running" # the step has 30 seconds to write what it knows
    wait "$running"
    mv "$out/running.txt" "$work/stopped.log"
    row "$step" FAILED 0 "interrupted"
  fi
  exit 143
}
trap stop TERM INT HUP

# -v: if the process is killed, the log still tells what passed. tests/gpu/conftest.py makes SIGTERM end it with a report.
pytest=("$python" -m pytest -v -p no:cacheprovider)
if [ -z "$(ask --lacks pytest_timeout)" ]; then
  # The thread method, because a test may hang outside of Python code.
  pytest+=(-o timeout_method=thread --timeout=100)
else
  pytest+=(-o addopts=) # not strict, because without the plugin pytest does not know the setting
fi

build_extension() {
  local options=()
  if command -v ninja >/dev/null; then options+=(-G Ninja); else options+=(-G "Unix Makefiles"); fi
  options+=(-DTORCHDDP_WERROR="${TORCHDDP_WERROR:-0}")
  if $dry_run && ! ask --builds-cuda; then
    options+=(-DTORCHDDP_CUDA=OFF -DTORCHDDP_OUTPUT_NAME="$(ask --extension cpu)")
  else
    # Only for the GPU of this machine.
    options+=(-DTORCHDDP_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$(ask --architecture)" -DTORCHDDP_OUTPUT_NAME="$(ask --extension cuda)")
  fi
  # CMake refuses a folder configured elsewhere, such as that of a copied checkout.
  grep -qsx "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" build/gpu/CMakeCache.txt || rm -rf build/gpu
  step configure cmake -S . -B build/gpu -DTORCHDDP_PYTHON="$python" "${options[@]}" &&
    step build cmake --build build/gpu --parallel "$cores"
}

# run_tests NAME: one process per file, so that a broken device context does not affect the others.
run_tests() { step "$1" "${pytest[@]}" --junitxml="$work/xml/$1.xml" "tests/gpu/$1.py"; }

# Joins the library's parts; if that fails, the tests that need it are skipped.
join_nccl() {
  ends_at[join_nccl]=${ends_at[test_two_ranks_nccl]}
  if [ -d "${TORCHDDP_TEST_NCCL:-}" ]; then
    # $1: the folder, $2: where the library is to be.
    if step join_nccl bash -euc '
      cd "$2"
      cat "$1"/libnccl.so.2*.part* >"$(basename "$1"/*.sha256 .sha256)"
      sha256sum --check "$1"/*.sha256
      if [ -e libnccl.so.2.xz ]; then xz --decompress libnccl.so.2.xz; fi
    ' join_nccl "$(realpath "$TORCHDDP_TEST_NCCL")" "$work"; then
      export TORCHDDP_TEST_NCCL="$work/libnccl.so.2"
    else
      unset TORCHDDP_TEST_NCCL
    fi
  fi
}

# What can reach outside of a tensor or leave a part of one unwritten: every alignment with every element size, two sizes at once,
# and the three sizes of the kernels' table. The other tests repeat these accesses with other numbers, at a hundredth of the speed.
checked_tests="alignment or wider or (number_of_gradients and (144 or 416 or 1168))"

# memcheck and initcheck; racecheck would have nothing to check, because the kernels use no shared memory. Without torch's caching
# allocator each tensor is its own allocation, so that accesses outside of it, and reads of what nobody wrote, are seen.
check_memory() {
  local tool=$1
  if $dry_run; then
    skip "$tool" "dry run"
  elif ! command -v compute-sanitizer >/dev/null; then
    skip "$tool" "compute-sanitizer is not installed"
  else
    local options=(--tool "$tool" --error-exitcode 9)
    # The CUDA runtime and NCCL ask the driver for functions that it may not have; memcheck counts each refusal as an error.
    if [ "$tool" = memcheck ]; then options+=(--report-api-errors no); fi
    step "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer "${options[@]}" "${pytest[@]}" -k "$checked_tests" tests/gpu/test_pack_gpu.py
  fi
}

# run_benchmarks NAME LAUNCHES ARGUMENTS...
run_benchmarks() {
  local name=$1 launches=$2 seconds=1 lacking where=()
  shift 2
  lacking=$(ask --lacks typer rich)
  if [ -n "$lacking" ]; then
    skip "$name" "no Python package ${lacking// /, }: put it on PYTHONPATH"
    return
  fi
  if $dry_run; then
    where=(--set device=cpu --set backend=gloo --quick)
  else
    # Of each launch: starting, building, checking and counting take the other half. A table's minimum may exceed its share.
    seconds=$((($(seconds_of "$name") - 35) / launches / 2))
    seconds=$((seconds < 2 ? 2 : seconds > 20 ? 20 : seconds))
  fi
  step "$name" "$python" -m benchmarks "$@" "${where[@]}" --seconds "$seconds" --json "$out/$name.json"
}

bench() {
  local plots=()
  if [ -z "$(ask --lacks matplotlib)" ]; then plots=(--out "$work/plots"); fi
  run_benchmarks bench 3 --case gpu "${plots[@]}"
  cp "$work"/plots/*.png "$out" 2>/dev/null
}

run_stage() {
  case "$1" in
    test_two_ranks_nccl)
      join_nccl
      run_tests "$1"
      ;;
    test_*) run_tests "$1" ;;
    memcheck | initcheck) check_memory "$1" ;;
    bench) bench ;;
    bench_rows) run_benchmarks "$1" 8 --case gpu_pack --case gpu_scale --case gpu_host --case gpu_memory ;;
    bench_two_ranks) run_benchmarks "$1" 1 --case gpu --world-size 2 --set backend=gloo --model resnet50 ;;
  esac
}

checks=()
if $dry_run; then checks+=(--cpu); fi
if ! $build; then checks+=(--no-build); fi
if ! step environment "$python" tests/gpu/environment.py "${checks[@]}"; then
  printf '%s\n' "${table[@]}"
  exit 2
fi

plan
if ! $build || build_extension; then
  for ((i = 0; i < ${#stages[@]}; i += 2)); do
    if [[ $chosen == *" ${stages[i]} "* ]]; then run_stage "${stages[i]}"; fi
  done
fi

cat "$out/summary.txt"
if [ "$any_failed" -eq 0 ]; then echo "all ok, results in $out"; else echo "something FAILED, results in $out"; fi
exit "$any_failed"
