# One file, two images. `samebits` has torch for CUDA: its wheels bring their own CUDA libraries, so the `base` flavour
# (driver hooks only) is enough. `samebits-cpu` (--build-arg TORCH=cpu) has torch for the CPU on a plain Ubuntu, the one
# that the other base is made from. The digests pin what the tags name today.
ARG TORCH=cuda
# Any Debian or Ubuntu can take their place: BASE_IMAGE=…
ARG BASE_IMAGE=base-$TORCH
FROM nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701 AS base-cuda
FROM ubuntu:24.04@sha256:4fbb8e6a8395de5a7550b33509421a2bafbc0aab6c06ba2cef9ebffbc7092d90 AS base-cpu


# The interpreter alone, shared by every later stage. tini becomes process 1 where the engine's own init cannot
# (compose.user.yaml); ca-certificates is for `ddp data fetch`.
FROM $BASE_IMAGE AS python
# The same bytes at each build: compiled Python files name the hash of their source, not its time, the user has one date,
# and what apt and ldconfig note of the day is removed (docs/reference/image.md). 1980-01-01, as in a bundle.
ARG SOURCE_DATE_EPOCH=315532800
RUN rm -f /etc/apt/apt.conf.d/docker-clean
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 tini ca-certificates \
    && rm -rf /var/log/apt /var/log/*.log /var/cache/ldconfig
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1


# Only the dependency lists, so that an edit of the tool settings in pyproject.toml does not reinstall torch: the next
# stage copies these files, and an unchanged file keeps its cached layers.
FROM python AS requirements
COPY pyproject.toml /
RUN python3 -c "import tomllib; \
    project = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
    lists = {'needed': project['dependencies'], **project['optional-dependencies']}; \
    write = lambda file, *names: open(file, 'w').write('\n'.join( \
        line for name in names for line in lists[name] if not line.startswith('samebits'))); \
    write('/runtime.txt', 'needed', 'digits', 'yaml', 'lab', 'report', 'tensorboard'); \
    write('/sbom.txt', 'sbom'); \
    write('/test.txt', 'cluster', 'test')"


# pip lives beside the environment, not in it: later stages borrow it, and it is never copied into the image.
FROM python AS pip
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv
COPY constraints.txt /
# The cache mount keeps downloads between builds and out of the layers.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/pip \
    && /opt/pip/bin/pip install --disable-pip-version-check -c /constraints.txt pip \
    && python3 -m venv --without-pip /opt/venv


# The environment without the project: what changes rarely and weighs much.
FROM python AS packages
COPY --from=pip /opt/venv /opt/venv
ARG TORCH
# Where the CPU build is: the package index has the CUDA build alone.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# For which CUDA torch is built: cu128 or cu126 for a host whose driver is older than 580. Without a value it is that of
# the package index, 13.0.
ARG TORCH_CUDA=
# torch and what it needs, a layer of its own. Test programs, tests and static libraries of a profiler go: nothing loads
# them. torch/include stays, for images that are built on this one and have a compiler.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    install() { /opt/pip/bin/pip --python /opt/venv/bin/python install -c /constraints.txt "$@"; }; \
    set -e; \
    case $TORCH in \
      cpu) install --no-deps --extra-index-url "$TORCH_CPU_INDEX" \
           "torch==$(sed -n 's/^torch==//p' /constraints.txt)+cpu" torchvision ;; \
      cuda) ;; \
      *) echo "TORCH=$TORCH: use TORCH=cpu or TORCH=cuda" >&2; exit 2 ;; \
    esac; \
    install ${TORCH_CUDA:+--extra-index-url https://download.pytorch.org/whl/$TORCH_CUDA} torch torchvision; \
    cd /opt/venv/lib/python3*/site-packages; \
    rm -rf torch/test triton/backends/nvidia/lib/cupti/*.a; \
    find torch/bin -mindepth 1 ! -name torch_shm_manager -delete; \
    find . -type d -name tests -prune -exec rm -rf {} +
# All other packages.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=requirements,source=/runtime.txt,target=/runtime.txt \
    /opt/pip/bin/pip --python /opt/venv/bin/python install -c /constraints.txt -r /runtime.txt hatchling \
    && find /opt/venv/lib -type d -name tests -prune -exec rm -rf {} +
# What your experiments import beside that: EXTRA_PIP="einops timm>=1". The pins hold for it, too, so it moves nothing
# that is there.
ARG EXTRA_PIP=
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    test -z "$EXTRA_PIP" || { set -f; /opt/pip/bin/pip --python /opt/venv/bin/python install -c /constraints.txt $EXTRA_PIP; }


# What runs: interpreter, environment, project. No compiler, no pip, and nothing that its user may write to.
FROM packages AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ddp
COPY --chmod=0755 tools/run-as-owner.sh /usr/local/bin/run-as-owner
COPY --chmod=0755 tools/what-to-do.sh /usr/local/bin/what-to-do
WORKDIR /app
COPY pyproject.toml README.md LICENSE samebits.py ./
COPY ddp_core ddp_core
COPY ddp_lab ddp_lab
COPY experiments experiments
COPY launch launch
COPY packages packages
# Editable, so that compose.yaml can lay the working tree's experiments over the image's. Compiled now, because nothing
# can be written later.
RUN --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-build-isolation \
       --editable . --editable packages/lab \
    && rm -rf build ./*.egg-info packages/__pycache__ \
    && python -m compileall -q samebits.py ddp_core ddp_lab experiments
# The user may have no name or home (any uid may run this), and the root is read-only: so all caches go to the tmpfs.
ENV HOME=/tmp \
    USER=ddp \
    MPLCONFIGDIR=/tmp/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    PYTHONDONTWRITEBYTECODE=1 \
    DDP_OUTPUT=/outputs \
    DDP_DATA=/data
ARG TORCH
# Last, because they change with every commit and must not cost a layer.
# `make` hands them in. A bare `docker compose build` cannot, and the image then says that its commit is unknown: .git
# stays out of the build, because in a worktree or an unpacked archive it names no commit, and it never says whether
# files were changed since.
ARG VERSION=0.2.0.dev0
ARG GIT_COMMIT=unknown
ARG GIT_DIRTY=unknown
ENV DDP_IMAGE_VERSION=$VERSION \
    DDP_IMAGE_TORCH=$TORCH \
    DDP_GIT_COMMIT=$GIT_COMMIT \
    DDP_GIT_DIRTY=$GIT_DIRTY
# Not among them: `created`, which would make two builds of one commit differ, and `source`, `url` and `documentation`,
# which need a public address.
LABEL org.opencontainers.image.title="samebits" \
      org.opencontainers.image.description="Data-parallel training in PyTorch: the same weights on every layout" \
      org.opencontainers.image.authors="The samebits developers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$GIT_COMMIT
# By number: Kubernetes' runAsNonRoot cannot tell from a name that it is not root.
USER 10001
# Healthy while the newest step of this container's ranks is less than a minute old, and where nothing trains. An engine
# alone only shows it; Swarm would end the container (launch/swarm/stack.yaml).
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["ddp", "health"]
# Some CUDA images have an entrypoint that prints a banner first.
ENTRYPOINT []
CMD ["what-to-do"]


# The runtime image plus what torch.compile and Triton call to build kernels: a C and C++ compiler and Python's headers.
# Not in the runtime image itself, because a compiler weighs some 300 MB and is of use to an intruder, too.
FROM runtime AS compiler
USER 0
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/log/apt /var/log/*.log /var/cache/ldconfig
ENV TRITON_CACHE_DIR=/tmp/triton
USER 10001


# What tests need beside the environment, in a folder of its own: the same for every commit, so it is installed once.
FROM packages AS test-tools
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=requirements,source=/test.txt,target=/test.txt \
    /opt/pip/bin/pip --python /opt/venv/bin/python install --prefix /opt/test-tools -c /constraints.txt -r /test.txt


# The runtime image plus test tools and the files that tests read.
FROM runtime AS test
USER 0
COPY --from=test-tools /opt/test-tools /opt/venv
COPY . .
ENV HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
USER 10001
HEALTHCHECK NONE
CMD ["pytest", "@tests/quick.args", "-p", "no:cacheprovider"]


# The runtime image plus the tool that lists its contents: tools/sbom.py runs it.
FROM runtime AS sbom
USER 0
COPY --from=requirements /sbom.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=pip,source=/opt/pip,target=/opt/pip \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    python3 -m venv --without-pip /opt/sbom \
    && /opt/pip/bin/pip --python /opt/sbom/bin/python install -c /constraints.txt -r /sbom.txt
USER 10001
HEALTHCHECK NONE


# What `docker build .` gives, as the last stage.
FROM runtime
