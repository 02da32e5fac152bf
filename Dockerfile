# One image for head, workers and load: what `make setup` installs, without the tests' tools.
#
#   docker build -t minicluster .
#
# GPU hosts: --build-arg REQUIREMENTS=gpu (not built by us: no GPU was at hand).
FROM python:3.11-slim-bookworm

ARG REQUIREMENTS=cpu
# Where pip has no torch for CPUs the PyTorch project's own index has it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# vLLM's CPU build is linked against both libraries, and compiles some of its steps at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/minicluster
COPY requirements requirements
RUN set -e; pip="python3 -m pip install --no-cache-dir"; \
    if [ "$REQUIREMENTS" = cpu ]; then \
        $pip --no-deps -r requirements/torch-cpu.txt \
        || $pip --no-deps --index-url "$TORCH_INDEX" -r requirements/torch-cpu.txt; \
        $pip --no-deps -r requirements/cpu.txt; \
    else \
        $pip -r "requirements/$REQUIREMENTS.txt"; \
    fi

COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY minicluster minicluster
COPY sizing sizing
COPY serving serving
COPY loadtest loadtest
RUN python3 -m pip install --no-cache-dir --no-deps hatchling==1.33.0 pathspec==1.1.1 \
        pluggy==1.7.0 trove-classifiers==2026.9.21.13 packaging \
    && python3 -m pip install --no-cache-dir --no-deps --no-build-isolation .

ENV RAY_DISABLE_DOCKER_CPU_WARNING=1 VLLM_NO_USAGE_STATS=1
# State of `serving up` lies beneath the working directory, caches of libraries in the home of
# whichever user runs the container (torch asks for a name).
ENV HOME=/var/lib/minicluster USER=minicluster
RUN useradd --uid 1000 --home-dir "$HOME" minicluster && mkdir -p "$HOME" && chmod 1777 "$HOME"
WORKDIR /var/lib/minicluster
USER minicluster
CMD ["serving", "--help"]
