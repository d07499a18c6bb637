#!/usr/bin/env bash
# Makes a machine without a Docker engine and without an image registry able to build the images and run compose.yaml:
# podman, runc and podman-compose, and a base image made of Debian's packages under the name that the Dockerfile uses.
set -euo pipefail

BASE=python:3.11-slim-bookworm
export CONTAINERS_CONF="$(dirname "$(readlink -f "$0")")/containers.conf"

missing=()
for program in podman runc debootstrap catatonit promtool; do
  command -v "$program" >/dev/null || [ -x "/usr/libexec/podman/$program" ] || missing+=("$program")
done
# Debian's promtool comes inside the package of the server, which must not start here.
missing=("${missing[@]/promtool/prometheus}")
if [ "${#missing[@]}" -gt 0 ]; then
  [ "$(id -u)" = 0 ] || { echo "error: ${missing[*]} missing: expected them installed, got none; apt-get install ${missing[*]}." >&2; exit 1; }
  apt-get update -qq
  policy=/usr/sbin/policy-rc.d
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; trap 'rm -f "$policy"' EXIT; }
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

if ! podman image exists "localhost/$BASE"; then
  root=$(mktemp -d /var/tmp/base.XXXX)
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,libpython3.11,ca-certificates bookworm "$root"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | podman import --quiet - "localhost/$BASE"
  rm -rf "$root"
fi
