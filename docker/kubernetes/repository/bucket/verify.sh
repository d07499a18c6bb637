#!/bin/sh
# verify.sh DIR: every file of every version in a copied repository has the hash that it was published with.
set -eu
found=0
for sums in "$1"/*/*/SHA256SUMS; do
  [ -f "$sums" ] || continue
  found=$((found + 1))
  (cd "$(dirname "$sums")" && sha256sum --check --quiet SHA256SUMS) || {
    echo "error: $(dirname "$sums") is not what was published: expected the hashes in its SHA256SUMS, got others; copy it again, and start the pod again once that has ended." >&2
    exit 1
  }
done
[ "$found" -gt 0 ] || {
  echo "error: no published version in $1: expected NAME/VERSION/SHA256SUMS, got none; correct the source of the copy." >&2
  exit 1
}
echo "$found versions are as they were published"
