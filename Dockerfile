# docker build -t memengine . && docker run --rm --gpus all -v $PWD:/work memengine train dino_vit
FROM python:3.12-slim
# What Triton and torch.compile compile with.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /opt/memengine
RUN pip install --no-cache-dir '/opt/memengine[optional]'
WORKDIR /work
ENTRYPOINT ["memengine"]
