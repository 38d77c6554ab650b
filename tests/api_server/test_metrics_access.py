"""Authenticated metrics on a real API server, with the roles of the chart, and metrics with TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import helm_python as helm
import pytest
import yaml
from tests.api_server.conftest import StartOperator
from tests.api_server.harness import TEST_AGENT, Cluster, Operator
from tests.support.ports import free_port
from tests.support.waiting import eventually_async

from ddpjob_operator import server
from ddpjob_operator.runtime.access import FORBIDDEN, OK, UNAUTHORIZED, Access
from ddpjob_operator.runtime.certificate import Certificate
from ddpjob_operator.runtime.client import Client
from ddpjob_operator.runtime.errors import ApiError
from ddpjob_operator.runtime.login import log_in

CHART = Path(__file__).parents[2] / "charts" / "ddpjob-operator"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture
async def roles(cluster: Cluster) -> AsyncIterator[None]:
    """Those of a release in the namespace, with a reader."""
    name = cluster.namespace
    metrics = {"authentication": True, "readers": [{"name": "prometheus", "namespace": name}]}
    values: dict[str, Any] = {"fullnameOverride": name, "metrics": metrics}
    with helm.Chart.load(CHART) as chart:
        text = chart.render(values, name=name, namespace=name)["ddpjob-operator/templates/clusterrole-metrics.yaml"]
    made = []
    for manifest in filter(None, yaml.safe_load_all(text)):
        resource = f"{manifest['kind'].lower()}s"
        await cluster.client.create(f"{RBAC}/{resource}", resource, manifest)
        made.append((f"{RBAC}/{resource}/{manifest['metadata']['name']}", resource))
    assert len(made) == 4
    yield
    for path, resource in made:
        with suppress(ApiError):
            await cluster.client.delete(path, resource)


async def test_a_scrape_needs_a_token_whose_user_may_read_metrics(
    cluster: Cluster, roles: None, start_operator: StartOperator
) -> None:
    own, prometheus, other = [await cluster.token(name) for name in (cluster.namespace, "prometheus", "other")]
    login = await log_in()
    headers = {**login.headers, "User-Agent": TEST_AGENT, "Authorization": f"Bearer {own}"}
    # the operator's account, which has no other right here than to review
    client = Client(replace(login, headers=headers), in_flight=4)
    wanted = {f"Bearer {prometheus}": OK, f"Bearer {other}": FORBIDDEN, "Bearer forged": UNAUTHORIZED}
    found: dict[str, int] = {}

    async def as_granted() -> bool:
        """What was refused is remembered for a while, so each look asks anew."""
        access = Access(client, "/metrics")
        found.update({header: await access.status(header) for header in wanted})
        return found == wanted

    try:
        # the API server's authorizer watches roles, as any other client
        await eventually_async(as_granted, f"the reviews say {list(wanted.values())}", instead=lambda: found)
    finally:
        await client.close()
    operator = await start_operator(METRICS_AUTHENTICATION="true")
    answers = {header: await scraped(operator, header) for header in (*wanted, "")}
    assert answers == wanted | {"": UNAUTHORIZED}


async def scraped(operator: Operator, header: str) -> int:
    headers = {"Authorization": header} if header else {}
    url = f"http://127.0.0.1:{operator.port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as page:
        await page.read()
        return page.status


def certified(folder: Path) -> Path:
    """A folder with a new certificate of an authority of its own, for 127.0.0.1."""
    folder.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "1", "-subj", f"/CN={folder.name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return folder


def mount(secret: Path, at: Path) -> Path:
    """As the kubelet mounts a Secret: the files are links through one link, which is replaced in one step."""
    at.mkdir(exist_ok=True)
    link = at / "..new"
    link.symlink_to(secret)
    link.rename(at / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (at / name).is_symlink():
            (at / name).symlink_to(f"..data/{name}")
    return at


async def trusted(port: int, authority: Path, token: str = "") -> int | None:
    """The HTTP status of a scrape that trusts this authority alone; None where it does not trust the server."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    tls = ssl.create_default_context(cafile=authority / "tls.crt")
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{port}/metrics", ssl=tls, headers=headers) as page,
        ):
            return page.status
    except aiohttp.ClientConnectorCertificateError:
        return None


async def test_a_scrape_is_encrypted_with_the_certificate_that_the_secret_has_now(
    cluster: Cluster, start_operator: StartOperator, tmp_path: Path
) -> None:
    first, second = (certified(tmp_path / name) for name in ("first", "second"))
    mounted = mount(first, tmp_path / "mounted")
    operator = await start_operator(METRICS_CERTIFICATE=mounted, METRICS_AUTHENTICATION="true")
    await operator.ready()  # the probes are plain
    assert (await operator.probe("metrics"))[0] == 0, "and the metrics are not"
    assert await trusted(operator.port, first) == UNAUTHORIZED
    assert await trusted(operator.port, second) is None
    mount(second, mounted)

    async def replaced() -> bool:
        return await trusted(operator.port, second) == UNAUTHORIZED

    await eventually_async(replaced, "the new certificate is served, without a restart")
    assert await trusted(operator.port, first) is None
    assert await operator.stop() == 0


async def test_a_certificate_that_cannot_be_used_does_not_replace_the_one_that_is_served(tmp_path: Path) -> None:
    first, second = (certified(tmp_path / name) for name in ("first", "second"))
    folder = Path(shutil.copytree(first, tmp_path / "folder"))
    certificate = Certificate(folder)
    page, port = await server.serve_metrics(free_port(), tls=certificate.context)
    try:
        shutil.copy(second / "tls.crt", folder)  # its key is on the way
        with pytest.raises(OSError, match=r"tls\.crt and .*tls\.key cannot be used"):
            certificate.read()
        assert await trusted(port, first) == OK
        shutil.copy(second / "tls.key", folder)
        assert (certificate.read(), certificate.read()) == (True, False)
        assert (await trusted(port, first), await trusted(port, second)) == (None, OK)
    finally:
        await page.cleanup()
    (folder / "tls.key").unlink()
    with pytest.raises(OSError, match=r"tls\.key"):
        Certificate(folder)
