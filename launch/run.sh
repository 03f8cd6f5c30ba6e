#!/usr/bin/env bash
# Runs a training command and says by its exit code whether the same command should be started again:
#
#   launch/run.sh OUTPUT_DIR torchrun ... recipes/finetuning.py ... --output_dir OUTPUT_DIR --resume auto
#
#   0     the run is finished
#   138   it is not, but wrote a newer checkpoint than it found: start it again
#   143   it was stopped by SIGTERM, SIGHUP or Ctrl-C: the sender decides what comes next
#   else  it would fail again: 2 is an error in settings or data, or an OUTPUT_DIR that is not the run's; 1 is anything
#         else, and under torchrun also an error that is found before there is a directory
#
# torchrun ends with 1 in most cases, so the code is derived from OUTPUT_DIR: status.json and checkpoints. An attempt
# must have written a checkpoint; otherwise a job could be restarted for ever. One that was only fetched from --save_to
# does not count. SIGUSR1 means that time is up: the script then ends at once, whatever the command is doing.
set -uo pipefail

if (($# < 2)); then
  echo "usage: launch/run.sh RUN_DIRECTORY COMMAND..." >&2
  exit 2
fi
output_dir=$1
shift

newest_checkpoint() {
  find "$output_dir/checkpoints" -mindepth 1 -maxdepth 1 -name 'step-*' 2>/dev/null | sort -V | tail -n 1
}
has_newer_checkpoint() {
  local newest
  newest=$(newest_checkpoint)
  [[ $newest != "$checkpoint_before" && ${newest##*/} != "$(cat "$output_dir/.fetched" 2>/dev/null)" ]]
}
status() { cat "$output_dir/status.json" 2>/dev/null; }

status_before=$(status)
checkpoint_before=$(newest_checkpoint)
told_to_stop=
time_is_up=

"$@" &
command=$!
trap 'told_to_stop=yes; kill -TERM "$command" 2>/dev/null' TERM INT HUP
trap 'time_is_up=yes' USR1
code=0
while [[ -z $time_is_up ]]; do
  wait "$command" # which a signal interrupts
  code=$?
  kill -0 "$command" 2>/dev/null || break
done

status_now=$(status)
if [[ $code == 0 && $status_now != *'"state": "finished"'* && $status_now == "$status_before" &&
  $(newest_checkpoint) == "$checkpoint_before" ]]; then
  echo "launch/run.sh: the command ended without writing $output_dir/status.json: is its --output_dir $output_dir?" >&2
  exit 2
fi
if [[ $code == 0 && $status_now != *'"state": "stopped"'* ]]; then # --stop_after ends with 0, too
  exit 0
fi
[[ $status_now == "$status_before" ]] && status_now= # of an earlier attempt: this one has not come so far
if [[ -n $told_to_stop || $status_now =~ \"exit_code\":\ (129|130|143), ]]; then
  exit 143
elif has_newer_checkpoint; then
  exit 138
elif [[ -n $time_is_up ]]; then
  echo "launch/run.sh: time is up, and this attempt has left no checkpoint. Allow more time, or save more often." >&2
  exit 1
elif [[ $status_now =~ \"exit_code\":\ ([1-9][0-9]*), ]]; then
  exit "${BASH_REMATCH[1]}"
fi
exit $((code == 0 || code > 127 ? 1 : code)) # Kubernetes would take a code above for "again"
