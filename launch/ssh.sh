#!/usr/bin/env bash
# A training run on hosts that are reached by ssh and have this repository at the same path:
#   HOSTS="host0 host1" launch/ssh.sh --config ... --workdir ...
# The first host is the coordinator. Ctrl-C stops all hosts politely. Exit status: 0 = complete; 75 = stopped and can go on;
# 1 = an error. See docs/launch.md.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

read -r -a hosts <<<"${HOSTS:?set HOSTS to the names of the hosts, with spaces between them}"
coordinator="${hosts[0]##*@}:${PORT:-8476}"
arguments=$(printf ' %q' "$@")
pids=()
for index in "${!hosts[@]}"; do
  # -tt: a signal to this script reaches the remote process through its terminal.
  ssh -tt -o BatchMode=yes "${hosts[$index]}" "cd $(printf %q "$PWD") && exec ${PYTHON:-.venv/bin/python} train.py$arguments \
    --coordinator=$coordinator --num_processes=${#hosts[@]} --process_id=$index" </dev/null &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM
status=0
for pid in "${pids[@]}"; do
  wait "$pid"
  one=$?
  while [ "$one" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do # the signal interrupted the wait, not the process
    wait "$pid"
    one=$?
  done
  if [ "$one" -ne 0 ] && { [ "$status" -eq 0 ] || [ "$one" -ne 75 ]; }; then status=$one; fi
done
exit "$status"
