#!/usr/bin/env bash
# Makes a machine without a Docker engine and without an image registry able to build the images and run compose.yaml:
# podman, runc and podman-compose, and images made of Debian's packages under the names that the Dockerfiles and
# compose.yaml use: the base image, nginx and Prometheus. Grafana and NVIDIA's images are no packages of Debian's.
set -euo pipefail

BASE=python:3.11-slim-bookworm
here=$(dirname "$(readlink -f "$0")")
export CONTAINERS_CONF="$here/containers.conf"

missing=()
for program in podman runc debootstrap catatonit promtool; do
  command -v "$program" >/dev/null || [ -x "/usr/libexec/podman/$program" ] || missing+=("$program")
done
# Lets containers find one another by name.
[ -x /usr/lib/cni/dnsname ] || missing+=(golang-github-containernetworking-plugin-dnsname)
# Debian's promtool comes inside the package of the server, which must not start here.
missing=("${missing[@]/promtool/prometheus}")
if [ "${#missing[@]}" -gt 0 ]; then
  [ "$(id -u)" = 0 ] || { echo "error: ${missing[*]} missing: expected them installed, got none; apt-get install ${missing[*]}." >&2; exit 1; }
  apt-get update -qq
  policy=/usr/sbin/policy-rc.d
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; trap 'rm -f "$policy"' EXIT; }
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

# make_image NAME PACKAGES [CHANGE...]: an image of Debian with these packages, unless there is one.
make_image() {
  local name=$1 packages=$2 root
  shift 2
  podman image exists "localhost/$name" && return
  root=$(mktemp -d /var/tmp/base.XXXX)
  debootstrap --variant=minbase --include="$packages" bookworm "$root"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
  # A new volume takes its owner from here.
  mkdir -p "$root/prometheus" && chown 65534:65534 "$root/prometheus"
  tar -C "$root" -c . | podman import --quiet "${@/#/--change=}" - "localhost/$name"
  rm -rf "$root"
}

# The name and version that compose.yaml asks for.
find_image() { sed -nE "s|^ +image: ($1:.+)|\1|p" "$here/../../compose.yaml"; }

make_image "$BASE" python3,python3-venv,python3-pip,libpython3.11,ca-certificates
make_image "$(find_image nginx)" nginx-light
make_image "$(find_image prom/prometheus)" prometheus \
  'ENTRYPOINT ["/usr/bin/prometheus"]' \
  'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]' \
  'USER 65534:65534'
