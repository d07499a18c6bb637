#!/bin/sh
# A checkpoint to a published TensorRT plan, in NVIDIA's image, on a machine with Docker, its NVIDIA toolkit and a GPU:
#
#   docker/tensorrt/build.sh CHECKPOINT REPOSITORY --name NAME [--precision fp16] [any option of `python -m export run`]
#
# MODELYARD_RELEASE=25.09 builds for, and in, another Triton than 24.10.
set -eu

if [ $# -lt 4 ]; then
    echo "usage: $0 CHECKPOINT REPOSITORY --name NAME [option of python -m export run ...]" >&2
    exit 2
fi
for tool in docker nvidia-smi; do
    if ! command -v "$tool" >/dev/null; then
        echo "error: $tool is not here: expected Docker with NVIDIA's toolkit and a GPU, got none; run this on a machine that has them." >&2
        exit 1
    fi
done
release="${MODELYARD_RELEASE:-24.10}"
image="modelyard-export-tensorrt:$release"
checkpoint="$(realpath "$1")"
mkdir -p "$2"
repository="$(realpath "$2")"
shift 2

docker build --build-arg "RELEASE=$release" --file "$(dirname "$0")/Dockerfile" --tag "$image" "$(dirname "$0")/../.."
cache="$HOME/.cache/modelyard"
mkdir -p "$cache"
exec docker run --rm --gpus all --user "$(id -u):$(id -g)" --ipc=host --env HOME=/home/export \
    --volume "$checkpoint:/checkpoint:ro" --volume "$repository:/models" --volume "$cache:/home/export/.cache/modelyard" \
    "$image" run /checkpoint --repository /models --engine tensorrt --target "$release" "$@"
