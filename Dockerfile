# Two images of one wheel:
#   docker build --target cpu -t pdserve:0.1.0-ray2.60.0-cpu .
#   docker build --target gpu -t pdserve:0.1.0-ray2.60.0-gpu .
# The tag names the Ray inside; `pdserve k8s check` compares it with the manifests and the lock files.
# All Python packages come from the lock files, complete and without resolving (--no-deps).
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY requirements/cpu.lock requirements/dev.lock requirements/
RUN grep -hE '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' requirements/*.lock | sort -u > build.lock \
    && pip install --no-cache-dir --no-deps -r build.lock
COPY pyproject.toml README.md LICENSE ./
COPY cluster/ cluster/
COPY router/ router/
COPY prefill_pool/ prefill_pool/
COPY decode_pool/ decode_pool/
COPY kv_transfer/ kv_transfer/
COPY loadtests/ loadtests/
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# What both need of the system: NUMA and OpenMP libraries, and a C++ compiler for the kernels that torch and Triton
# compile when an engine starts.
FROM ${PYTHON_IMAGE} AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 pdserve \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash pdserve
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1
WORKDIR /home/pdserve

FROM runtime AS cpu
COPY requirements/cpu.lock /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/cpu.lock && rm /tmp/cpu.lock
COPY --from=wheel /wheels/ /wheels/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl && rm -r /wheels
USER 1000:1000
EXPOSE 8000
CMD ["pdserve", "--help"]

FROM runtime AS gpu
COPY requirements/gpu.lock /tmp/
RUN pip install --no-cache-dir --no-deps -r /tmp/gpu.lock && rm /tmp/gpu.lock
COPY --from=wheel /wheels/ /wheels/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl && rm -r /wheels
USER 1000:1000
EXPOSE 8000
CMD ["pdserve", "--help"]
