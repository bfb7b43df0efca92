# The service with the demo model, as two images: --target cpu (the last, so the default) and --target cuda. They differ in
# torch's build, which pip's index decides: the default package index has CUDA builds for Linux on x86. Give one with CPU builds, or
# another of CUDA, by --build-arg PIP_EXTRA_INDEX_URL=... . Files that requirements.lock has no hash of are refused.
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

FROM base AS build
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /src
RUN python -m venv /venv
COPY requirements.lock requirements-cuda.lock ./
COPY .ci/install.py .ci/
# The big layer first, so that a change of code does not fetch it again; the tools of development stay out.
RUN PIP_NO_CACHE_DIR=1 /venv/bin/python .ci/install.py --no-dev
COPY pyproject.toml README.md LICENSE ./
COPY unbind_core unbind_core
COPY unbind_lab unbind_lab
COPY server server
COPY modules modules
# The lock has setuptools too, which builds this: nothing is fetched here.
RUN /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation --no-index .

# An image of the wrong build would be found out much later: gigabytes too large, or without its GPU.
FROM build AS build-cpu
RUN /venv/bin/python -c "import sys, torch; sys.exit(torch.version.cuda and 'this is a CUDA build of torch: build --target cuda, or give an index with CPU builds by --build-arg PIP_EXTRA_INDEX_URL')"

FROM build AS build-cuda
RUN /venv/bin/python -c "import sys, torch; sys.exit(None if torch.version.cuda else 'this is a CPU build of torch: build --target cpu, or give an index with CUDA builds by --build-arg PIP_EXTRA_INDEX_URL')"

FROM base AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /data unbind && install -d -m 700 -o unbind -g unbind /data
WORKDIR /data
VOLUME /data
ENV PATH=/venv/bin:$PATH UNBIND_HOST=0.0.0.0 UNBIND_PORT=8000 UNBIND_DATA_DIR=/data
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["unbind"]
CMD ["serve"]

# torch brings the CUDA libraries; the driver and these variables' meaning are NVIDIA's container toolkit's: --gpus all.
FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility UNBIND_DEVICE=cuda
COPY --from=build-cuda /venv /venv

FROM runtime AS cpu
COPY --from=build-cpu /venv /venv
