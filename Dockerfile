# One image file for all services. Targets: `reward` (without torch), `compute` (trainer, rollout and
# `sluice prepare`), and the same with an inference engine: `cuda` for NVIDIA GPUs, `ascend` for Ascend
# NPUs, neither ever built by us. No RUN --mount and no frontend line, so that every builder takes it.
# docs/deployment/compose.md has the build arguments.
ARG BASE_IMAGE=python:3.11-slim
ARG REWARD_BASE_IMAGE=python:3.11-slim
# With a C compiler, which Triton calls.
ARG CUDA_BASE_IMAGE=python:3.11
# For Atlas A2; the tag for A3 ends in -a3.
ARG ASCEND_BASE_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0

# The requirements alone: a change of other lines in pyproject.toml renews no layer below.
FROM ${REWARD_BASE_IMAGE} AS requirements
WORKDIR /src
COPY pyproject.toml constraints.txt constraints-vllm-cuda.txt constraints-sglang-cuda.txt \
    deploy/docker/image_requirements.py ./
ARG EXTRAS=train,dashboard,metrics,traces
ARG REWARD_EXTRAS=certs,metrics,traces
ARG WITHOUT=""
# Of the target `cuda`: vllm or sglang.
ARG ENGINE=vllm
RUN python image_requirements.py "${REWARD_EXTRAS}" /wanted/reward && \
    python image_requirements.py "${EXTRAS}" /wanted/compute "${WITHOUT}" && \
    python image_requirements.py "${ENGINE},${EXTRAS}" /wanted/cuda "" "constraints-${ENGINE}-cuda.txt" && \
    python image_requirements.py "${EXTRAS}" /wanted/ascend torch,transformers

FROM ${REWARD_BASE_IMAGE} AS reward-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_FIND_LINKS=/wheelhouse PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /wanted
COPY --from=requirements /wanted/reward ./
RUN mkdir -p /wheelhouse && pip install -c constraints.txt -r requirements.txt

FROM ${BASE_IMAGE} AS compute-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# --system-site-packages keeps torch of a vendor's image in use.
ARG VENV_OPTIONS=""
ENV PIP_FIND_LINKS=/wheelhouse PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv ${VENV_OPTIONS} /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /wanted
# The folder need not exist: the file beside it is always there. pip prefers a wheel of a CPU build
# in it to the default build of the same version.
COPY constraints.txt wheelhouse* /wheelhouse/
COPY --from=requirements /wanted/compute ./
ARG EXTRA_REQUIREMENTS=""
RUN pip install -c constraints.txt -r requirements.txt ${EXTRA_REQUIREMENTS}

FROM reward-packages AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY sluice sluice
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${REWARD_BASE_IMAGE} AS reward
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home sluice && mkdir -p /runs && chown sluice:sluice /runs
WORKDIR /runs
COPY --from=reward-packages /opt/venv /opt/venv
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index --no-cache-dir /dist/*.whl
USER sluice
ENTRYPOINT ["python", "-m", "sluice.launch.container"]

FROM ${BASE_IMAGE} AS compute
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home sluice && mkdir -p /runs && chown sluice:sluice /runs
WORKDIR /runs
COPY --from=compute-packages /opt/venv /opt/venv
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index --no-cache-dir /dist/*.whl
USER sluice
ENTRYPOINT ["python", "-m", "sluice.launch.container"]

# Last, so that a builder that makes every stage before its target makes none of these for the others.
# No wheelhouse: a CPU wheel of torch in it would come before the build for CUDA.
FROM ${CUDA_BASE_IMAGE} AS cuda
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /wanted
COPY --from=requirements /wanted/cuda ./
RUN pip install -c constraints.txt -r requirements.txt
RUN useradd --uid 10001 --create-home sluice && mkdir -p /runs && chown sluice:sluice /runs
WORKDIR /runs
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl
USER sluice
ENTRYPOINT ["python", "-m", "sluice.launch.container"]

# torch, torch-npu, vLLM and their packages are the image's, in the versions that CANN takes: nothing
# is pinned, and pip installs what is not there.
FROM ${ASCEND_BASE_IMAGE} AS ascend
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0
RUN python3 -m venv --system-site-packages /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /wanted
COPY --from=requirements /wanted/ascend/requirements.txt ./
RUN pip install -r requirements.txt
RUN useradd --uid 10001 --create-home sluice && mkdir -p /runs && chown sluice:sluice /runs
WORKDIR /runs
COPY --from=wheel /dist /dist
RUN pip install --no-deps --no-index /dist/*.whl
USER sluice
ENTRYPOINT ["python", "-m", "sluice.launch.container"]
