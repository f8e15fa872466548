# The operator: no torch, no Ray, no shell needed. `docker build --tag rlhf-operator .`
# tests/helm/test_the_operator_needs_no_torch.py installs the same wheel the same way; the image itself has never been
# built, for there is no container engine where this project is tested.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY crds ./crds
COPY operator ./operator
COPY trainer_image/rlhf_trainer ./trainer_image/rlhf_trainer
COPY examples/rlhf_examples ./examples/rlhf_examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
COPY requirements/cpu.lock constraints.txt
# The constraints name the versions that were tested; of them only what the extra `operator` needs is installed.
RUN python -m venv /opt/rlhf \
    && /opt/rlhf/bin/pip install --no-cache-dir --constraint constraints.txt "$(echo /wheels/*.whl)[operator]" \
    && /opt/rlhf/bin/rlhf-operator --help > /dev/null

FROM python:${PYTHON}
COPY --from=build /opt/rlhf /opt/rlhf
ENV PATH=/opt/rlhf/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9090 8081
ENTRYPOINT ["rlhf-operator"]
