# docker build -t foundry .
# docker build -t foundry:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11-slim

# Index from which pip installs PyTorch: the CPU build by default, or a CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch \
    && pip install --no-cache-dir -c /source/constraints.txt /source \
    && rm -rf /source

# torch.compile uses Triton on GPUs, which builds the launchers of its kernels with a C compiler.
RUN case "$TORCH_INDEX" in */cpu) ;; *) apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* ;; esac

# An unprivileged user writes runs to /work.
RUN useradd --create-home --uid 1000 foundry && install -d -o foundry /work
USER foundry
WORKDIR /work

ENTRYPOINT ["python", "-m", "foundry"]
