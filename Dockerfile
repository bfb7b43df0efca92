# The service with the demo model. Where the default package index offers only CUDA builds of torch, give an index with CPU
# builds: docker build --build-arg PIP_EXTRA_INDEX_URL=... . Files that requirements.lock has no hash of are refused.
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

WORKDIR /src
COPY requirements.lock requirements-cuda.lock ./
COPY .ci/install.py .ci/
# The big layer first, so that a change of code does not fetch it again; the tools of development stay out.
RUN PIP_NO_CACHE_DIR=1 python .ci/install.py --no-dev
COPY pyproject.toml README.md LICENSE ./
COPY unbind_core unbind_core
COPY unbind_lab unbind_lab
COPY server server
COPY modules modules
# The lock has setuptools too, which builds this: nothing is fetched here.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --no-index . && rm -rf /src

RUN useradd --system --uid 10001 --home-dir /data --create-home unbind
USER 10001:10001
WORKDIR /data
VOLUME /data
ENV UNBIND_HOST=0.0.0.0 UNBIND_PORT=8000 UNBIND_DATA_DIR=/data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["unbind"]
CMD ["serve"]
