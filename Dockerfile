# ElasticCB, as pods and containers run it; a base image for model zoos (docs/kubernetes.md#a-base-image-with-elasticcb).
#   docker build -t elasticcb:cpu .
#   docker build -t elasticcb:gpu --build-arg TENSORFLOW=gpu .
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim

FROM ${PYTHON_IMAGE} AS wheels
ARG TENSORFLOW_VERSION=2.21.0
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY proto proto
COPY elasticcb elasticcb
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .
# tensorflow-cpu is the same modules under another name, which no requirement knows; this empty package has it instead.
WORKDIR /tensorflow
RUN printf '[project]\nname = "tensorflow"\nversion = "%s"\ndependencies = ["tensorflow-cpu==%s"]\n' \
        "${TENSORFLOW_VERSION}" "${TENSORFLOW_VERSION}" > pyproject.toml \
    && python -m pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels/cpu .

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="ElasticCB" \
      org.opencontainers.image.description="Elastic parameter-server training for Keras 3" \
      org.opencontainers.image.licenses="Apache-2.0"
# cpu or gpu
ARG TENSORFLOW=cpu
ARG TENSORFLOW_VERSION=2.21.0
ARG EXTRAS=kubernetes,s3
COPY --from=wheels /wheels /wheels
# All packages with their hashes, for the versions and extras above; `make locks` makes these files.
COPY deploy/image /locks
# Wheels of tensorflow for other machines than x86_64 are for the CPU alone.
# hadolint ignore=DL3013
RUN case "${TENSORFLOW}-$(uname -m)" in \
        cpu-x86_64) tensorflow=$(ls /wheels/cpu/*.whl) ;; \
        cpu-*) tensorflow="tensorflow==${TENSORFLOW_VERSION}" ;; \
        gpu-x86_64) tensorflow="tensorflow[and-cuda]==${TENSORFLOW_VERSION}" ;; \
        *) echo "TENSORFLOW=${TENSORFLOW} on $(uname -m): expected cpu, or gpu on x86_64" >&2; exit 2 ;; \
    esac \
    && python -m pip install --no-cache-dir --require-hashes --requirement="/locks/${TENSORFLOW}.lock" \
    && python -m pip install --no-cache-dir "${tensorflow}" "$(ls /wheels/*.whl)[${EXTRAS}]"

# The user of all pods, who may write to /tmp alone.
USER 1000:1000
WORKDIR /tmp
# By the second variable NVIDIA's container toolkit brings in the driver's libraries where there are GPUs.
ENV HOME=/tmp NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["elasticcb"]
CMD ["--help"]
