# syntax=docker/dockerfile:1
# Images of the hub and of the agent, and one of the agent with simulated GPUs, for trials and tests:
#   docker build --target hub             -t gpushare-hub .
#   docker build --target agent           -t gpushare-agent .
#   docker build --target agent-simulated -t gpushare-agent:simulated .
# The C library is compiled for the platform of the build with the compiler from PyPI: no gcc, no CUDA. JupyterLab's extension
# is built with node from PyPI and packages of the npm registry. For x86-64 and arm64 at once: docker buildx build --platform linux/amd64,linux/arm64 ...
# The base images are named by tag here: a digest belongs to one day. `python3 .ci/release.py bases` asks the registries for the
# digests and prints them as build arguments; a release builds with them, and its base-images.txt has them. To build the same for
# ever: docker build $(sed 's/^/--build-arg=/' base-images.txt) ...

ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm
# that of your zero-to-jupyterhub, 4.4.0 or later
ARG HUB_IMAGE=quay.io/jupyterhub/k8s-hub:4.4.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jupyterhub_config.d jupyterhub_config.d
COPY systemd systemd
COPY templates templates
COPY helm-values helm-values
COPY monitoring monitoring
COPY gpushare_spawner gpushare_spawner
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM wheel AS simgpu-wheel
COPY packages packages
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /simgpu ./packages/gpushare-simgpu

FROM ${HUB_IMAGE} AS hub
USER root
# what the image has stays as it is: the hub, kubespawner and the client of Kubernetes
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python3 -m pip list --format=freeze > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt /wheel/*.whl \
    && rm /tmp/constraints.txt
# No config file: without helm-values/jupyterhub.yaml, or `load_subconfig` in your own file, the hub keeps its spawner.
# zero-to-jupyterhub's own user, by number: that is what `runAsNonRoot` can check
USER 1000

FROM ${PYTHON_IMAGE} AS agent
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "$(echo /wheel/*.whl)[kubernetes]"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# As root: the kubelet's sockets are root's. The chart takes all capabilities away and mounts the root folder read-only.
ENTRYPOINT ["gpushare"]
CMD ["agent", "--kubernetes"]

FROM agent AS agent-simulated
RUN --mount=type=bind,from=simgpu-wheel,source=/simgpu,target=/simgpu \
    pip install --no-cache-dir /simgpu/*.whl \
    && ln -s "$(python -c 'import gpushare_simgpu; print(gpushare_simgpu.folder())')" /opt/gpushare-simgpu
# for the agent itself; it installs the driver on the node for the notebooks
ENV LD_LIBRARY_PATH=/opt/gpushare-simgpu
