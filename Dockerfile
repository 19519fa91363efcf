# syntax=docker/dockerfile:1
# The image of a run in a cluster: multigpu-ft with its trackers and torch for CUDA, as a user who is not root.
#
#   docker build --tag registry.example/multigpu-ft:0.1.0 .
#   docker push registry.example/multigpu-ft:0.1.0             prints the digest that resources.yaml asks for
#
# BASE is an exact version; a build that must be the same tomorrow names it by digest: --build-arg BASE=python@sha256:...
# TORCH_INDEX decides for which CUDA torch is; the driver is the node's. cu126 for older drivers, cpu for a cluster without GPUs.
# EXTRAS are those of settings.ini; deepspeed and compile=True want a compiler, which is not in this image.
ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG EXTRAS=tracking,quantization
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/multigpu-ft
ENV PATH=/opt/multigpu-ft/bin:$PATH
WORKDIR /src
# torch first, and by itself: it is most of the image, and this layer changes when its version does
COPY constraints.txt .
RUN pip install --constraint constraints.txt --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple torch
COPY setup.py settings.ini README.md LICENSE ./
COPY multigpu_ft multigpu_ft
COPY nbs nbs
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"

FROM ${BASE}
RUN groupadd --gid 1000 multigpu-ft && useradd --uid 1000 --gid 1000 --create-home multigpu-ft
COPY --from=build /opt/multigpu-ft /opt/multigpu-ft
# GKE mounts the driver under /usr/local/nvidia; elsewhere the container toolkit puts it where the linker looks
ENV PATH=/opt/multigpu-ft/bin:$PATH:/usr/local/nvidia/bin LD_LIBRARY_PATH=/usr/local/nvidia/lib64 NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/multigpu-ft
USER 1000:1000
CMD ["multigpu-ft", "--help"]
