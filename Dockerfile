# leanconv in a container, without a compiler of C++ and without the CUDA toolkit.
#
#   docker build -t leanconv .                            # drivers for CUDA 12: --build-arg CUDA=12.8.1 --build-arg EXTRA=cu12
#   docker run --rm --gpus all leanconv                   # leanconv doctor
#
# A service adds to it its program and a bundle of the kernels that it needs (docs/deployment.md):
#
#   FROM leanconv
#   COPY kernels.zip /opt/kernels.zip
#   ENV LEANCONV_BUNDLE=/opt/kernels.zip
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/leanconv
ENV PATH=/opt/leanconv/bin:$PATH

ARG EXTRA=cu13
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src${EXTRA:+[${EXTRA}]}"

# Compiled kernels stay where this folder is mounted: -v leanconv-cache:/var/cache/leanconv
ENV LEANCONV_CACHE_DIR=/var/cache/leanconv
RUN install -d -o 1000 -g 1000 /var/cache/leanconv
USER 1000:1000
ENTRYPOINT ["leanconv"]
CMD ["doctor"]
