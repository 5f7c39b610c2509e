# docker build -t memengine . && docker run --rm --gpus all -v $PWD:/work memengine train dino_vit
FROM python:3.12-slim
COPY . /opt/memengine
RUN pip install --no-cache-dir '/opt/memengine[optional]'
WORKDIR /work
ENTRYPOINT ["memengine"]
