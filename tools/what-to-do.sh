#!/bin/sh
# What `docker run IMAGE` prints: the first commands, to be copied as they stand.
name=samebits
[ "${DDP_IMAGE_TORCH:-}" = cpu ] && name=samebits-cpu
sed -e "s|@NAME@|$name|" -e "s|@VERSION@|${DDP_IMAGE_VERSION:-}|" <<'TEXT'
samebits @VERSION@: data-parallel training in PyTorch that ends with the same weights on every layout.

Train on the handwritten digits in two processes, then see what came of it:

    IMAGE=@NAME@
    mkdir -p outputs
    docker run --rm --init --user "$(id -u):$(id -g)" -v "$PWD/outputs:/outputs" $IMAGE ddp train digits --layout ddp --nproc-per-node 2
    docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/outputs:/outputs" $IMAGE ddp compare
    docker run --rm $IMAGE ddp --help

Runs, checkpoints and figures are in outputs/digits/. Without that volume they end with the container.
Your own experiment: add -v "$PWD:/work:ro" -w /work, and name its file, mine.py, in the place of digits.
Data sets: add -v "$PWD/data:/data". Loader processes: add --shm-size 1g.
On GPUs, with the image that has torch for CUDA: add --gpus all --shm-size 1g --ulimit memlock=-1.

In a clone of the repository, Docker Compose knows all of this:

    docker compose up ddp-cpu
    docker compose up ddp-4gpu
TEXT
