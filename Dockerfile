# The operator. Built by tests/cluster/images.sh, or by hand:
#   docker build -t ddpjob-operator .
#
# BASE_IMAGE needs Python 3.11 or newer with venv, as `python3`.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS source
COPY LICENSE /opt/ddpjob/
COPY operator/ddpjob_operator /opt/ddpjob/ddpjob_operator
ARG VERSION=0
# A checkout made with umask 077 has files that only its owner reads, who is root here. And a distribution in name only, so
# that the package knows its version.
RUN chmod -R a+rX /opt/ddpjob \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/ddpjob \
    && mkdir "/opt/ddpjob/ddpjob-${VERSION}.dist-info" \
    && printf 'Metadata-Version: 2.1\nName: ddpjob\nVersion: %s\n' "${VERSION}" > "/opt/ddpjob/ddpjob-${VERSION}.dist-info/METADATA"

FROM ${BASE_IMAGE}
# The root file system is read-only where this runs, so nothing can be compiled later. Some base images leave even the
# standard library uncompiled.
RUN python3 -m compileall -q -x 'lib2to3|/test' "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && groupadd --gid 65532 ddpjob \
    && useradd --uid 65532 --gid 65532 --no-log-init --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ddpjob
COPY requirements/operator.txt /opt/requirements/
# Third-party packages: installed again only when the lock file changes. Secrets are the builder's own settings for pip, where
# it has any; no layer keeps them, nor pip.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/pip-ca.crt \
    python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/pip \
    && /opt/pip/bin/pip --python /opt/venv/bin/python install --no-compile --require-hashes -r /opt/requirements/operator.txt \
    && /opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv/lib \
    && /opt/venv/bin/python -c 'import sysconfig; print("/opt/ddpjob", file=open(sysconfig.get_path("purelib") + "/ddpjob.pth", "w"))' \
    && rm -r /opt/pip
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "ddpjob_operator.main"]
# Last what changes most.
COPY --from=source /opt/ddpjob /opt/ddpjob
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ddpjob-operator" \
      org.opencontainers.image.description="Runs DDPJobs: fault-tolerant PyTorch DistributedDataParallel on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
