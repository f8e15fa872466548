# The operator: no torch, no Ray, no shell needed. `make images` builds it, with or without Docker; docs/images.md has
# the recipes. Any base will do that has Python 3.11 or newer with its module venv.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
USER 0
ARG PYTHON=python3
# Files given as secrets `pip` (a pip.conf: an index of your own) and `ca` (a bundle of certificates); neither is needed.
ARG PIP_CONFIG_FILE=/run/secrets/pip
ARG PIP_CERT
WORKDIR /source
COPY requirements/operator.lock requirements/image-tools.lock ./
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \
    ${PYTHON} -m venv --without-pip /opt/rlhf \
    && ${PYTHON} -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir --no-deps --requirement image-tools.lock \
    && /opt/tools/bin/pip --python /opt/rlhf install --no-cache-dir --no-deps --requirement operator.lock \
    && mkdir /opt/lists \
    && /opt/tools/bin/cyclonedx-py environment /opt/rlhf/bin/python --output-file /opt/lists/sbom.cdx.json \
    && /opt/tools/bin/pip-licenses --python=/opt/rlhf/bin/python --format=csv --output-file=/opt/lists/licences.csv
COPY pyproject.toml README.md LICENSE ./
COPY crds ./crds
COPY operator ./operator
COPY trainer_image/rlhf ./trainer_image/rlhf
COPY trainer_image/rlhf_trainer ./trainer_image/rlhf_trainer
COPY trainer_image/rlhf_importers ./trainer_image/rlhf_importers
COPY examples/rlhf_examples ./examples/rlhf_examples
# Without a network: a change of the sources builds this layer and no other.
RUN /opt/tools/bin/pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/tools/bin/pip --python /opt/rlhf install --no-index --no-deps --no-cache-dir /wheels/*.whl \
    && /opt/rlhf/bin/rlhf-operator --help > /dev/null

FROM ${BASE}
COPY --from=build /opt/lists /usr/share/rlhf
COPY --from=build /opt/rlhf /opt/rlhf
ENV PATH=/opt/rlhf/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# Any other user will do too: the operator writes no file.
USER 65532:65532
EXPOSE 9090 8081
ENTRYPOINT ["rlhf-operator"]
