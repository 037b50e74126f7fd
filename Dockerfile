# syntax=docker/dockerfile:1
# docker build --build-arg VARIANT=cpu -t adaptive-spec .          (or VARIANT=cuda)
# docs/deployment.md says what to mount and what to set.
ARG VARIANT=cpu

FROM python:3.11-slim-bookworm AS build
# The index of torch's builds for one kind of device; empty: the default index, whose torch runs on CUDA and on the CPU
# and is some gigabytes larger than the one for the CPU alone.
ARG TORCH_INDEX_URL=""
RUN python -m venv /opt/adaptive-spec
ENV PATH=/opt/adaptive-spec/bin:$PATH PIP_CACHE_DIR=/var/cache/pip
WORKDIR /source
COPY constraints.txt ./
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
COPY migrations migrations
COPY adaptive_spec adaptive_spec
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --constraint constraints.txt ".[postgres,s3]"

FROM python:3.11-slim-bookworm AS runtime-cpu
ENV ADAPTIVE_SPEC_MODEL__DEVICE=cpu

FROM python:3.11-slim-bookworm AS runtime-cuda
ENV ADAPTIVE_SPEC_MODEL__DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${VARIANT}
COPY --from=build /opt/adaptive-spec /opt/adaptive-spec
RUN useradd --uid 10001 --create-home adaptive-spec \
    && install --directory --owner adaptive-spec --group adaptive-spec \
        /var/lib/adaptive-spec /var/cache/adaptive-spec
ENV PATH=/opt/adaptive-spec/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_DATA_HOME=/var/lib \
    XDG_CACHE_HOME=/var/cache \
    HF_HOME=/var/cache/adaptive-spec/hub \
    ADAPTIVE_SPEC_SERVER__HOST=0.0.0.0
# State: a SQLite database, traces, releases.  Cache: models, which can be fetched again.
VOLUME ["/var/lib/adaptive-spec", "/var/cache/adaptive-spec"]
USER 10001
WORKDIR /var/lib/adaptive-spec
EXPOSE 8000
# A first start fetches the target and measures what a step costs.
HEALTHCHECK --start-period=15m --interval=15s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
ENTRYPOINT ["adaptive-spec"]
CMD ["serve"]
