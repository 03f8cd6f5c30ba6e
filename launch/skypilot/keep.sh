#!/usr/bin/env bash
# Runs a command that writes a run's directory to a disk which may be lost, and keeps in a bucket what another machine
# needs to resume:
#
#   launch/skypilot/keep.sh OUTPUT_DIR KEPT launch/run.sh OUTPUT_DIR torchrun ...
#
# The run itself cannot write into a mounted bucket: a checkpoint is completed by renaming its directory, and buckets do
# not rename in one step. So complete checkpoints are copied every minute; a copy is valid if its name is in
# KEPT/complete. A missing OUTPUT_DIR is first restored from KEPT. For one node only, because every node writes its part
# of a checkpoint. The exit code is the command's.
set -euo pipefail
shopt -s nullglob

output_dir=${1:?usage: launch/skypilot/keep.sh OUTPUT_DIR KEPT COMMAND...} kept=$2
shift 2

# Under another name until all is there: what is half restored is not to be taken for a run.
restore() {
  part=$output_dir.part
  rm -rf "$part"
  mkdir -p "$part/checkpoints"
  for mark in "$kept"/complete/*; do
    cp -r "$kept/checkpoints/$(basename "$mark")" "$part/checkpoints/"
  done
  for file in "$kept"/{config.yaml,metrics.jsonl,facts.json,checkpoints/best.json}; do
    [[ ! -e $file ]] || cp "$file" "$part/${file#"$kept"/}"
  done
  mv "$part" "$output_dir"
}

# In a subshell that ends at its first error (with || it would not): a mount that fails for a moment is not to end the
# training.
keep() {
  set +e
  (
    set -e
    copy
  )
  local failed=$?
  ((failed == 0)) || echo "keep.sh: not everything could be copied to $kept" >&2
  set -e
}

copy() {
  mkdir -p "$kept/checkpoints" "$kept/complete"
  for folder in "$output_dir"/checkpoints/step-*; do
    name=$(basename "$folder")
    [[ ! -e $kept/complete/$name ]] || continue
    rm -rf "$kept/checkpoints/$name"
    # --keep_last may delete it meanwhile
    if cp -r "$folder" "$kept/checkpoints/$name"; then
      touch "$kept/complete/$name"
    else
      rm -rf "$kept/checkpoints/$name"
    fi
  done
  for mark in "$kept"/complete/*; do
    name=$(basename "$mark")
    [[ -e $output_dir/checkpoints/$name ]] || rm -rf "$mark" "$kept/checkpoints/$name"
  done
  for file in "$output_dir"/{*.yaml,*.json,*.jsonl,*.html,checkpoints/best.json}; do
    [[ ! -e $file ]] || cp "$file" "$kept/${file#"$output_dir"/}"
  done
}

[[ -d $output_dir || ! -d $kept/complete ]] || restore
"$@" &
command=$!
trap 'kill -TERM "$command" 2>/dev/null || true' TERM INT
next=0
while kill -0 "$command" 2>/dev/null; do
  sleep 1
  if ((SECONDS >= next)); then
    keep
    next=$((SECONDS + 60))
  fi
done
code=0
wait "$command" || code=$?
keep
for folder in "$output_dir"/{model,tensorboard,wandb}; do
  [[ ! -d $folder ]] || cp -r "$folder" "$kept/"
done
exit "$code"
