#!/usr/bin/env bash
# Copies a folder to a node's own disk, once: launch/slurm/copy_to_node.sh FOLDER PARENT
# Jobs that share a node wait for each other, and a copy that was cut off is made again.
set -euo pipefail

folder=${1%/} parent=$2
copy=$parent/$(basename "$folder")
"$(dirname "$0")/node_disk.sh" "$parent"
exec 9>"$parent/.lock"
flock 9
if [[ ! -d $copy || ! -O $copy ]]; then
  rm -rf "$copy" "$copy.part"
  cp -rL "$folder" "$copy.part"
  mv "$copy.part" "$copy"
fi
