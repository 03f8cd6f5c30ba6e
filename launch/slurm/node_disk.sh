#!/usr/bin/env bash
# Makes a directory on a node's own disk that only this user can write: launch/slurm/node_disk.sh FOLDER
# In /tmp another user could have made it first, with a model or a cache of his own.
set -euo pipefail

folder=$1
mkdir -p "$(dirname "$folder")"
mkdir -m 700 "$folder" 2>/dev/null || true
if [[ ! -d $folder || -L $folder || ! -O $folder ]]; then
  echo "error: $(uname -n): $folder is not a directory of yours. Set NODE_DISK to another, such as $folder-2." >&2
  exit 2
fi
chmod go-w "$folder"
