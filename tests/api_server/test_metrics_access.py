"""Authenticated metrics on a real API server, with the roles of the chart."""

from __future__ import annotations

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

from ddpjob_operator.runtime.access import FORBIDDEN, OK, UNAUTHORIZED, Access
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
    access = Access(client, "/metrics")
    wanted = {f"Bearer {prometheus}": OK, f"Bearer {other}": FORBIDDEN, "Bearer forged": UNAUTHORIZED}
    try:
        assert {header: await access.status(header) for header in wanted} == wanted
    finally:
        await client.close()
    operator = await start_operator(METRICS_AUTHENTICATION="true")
    assert (await operator.probe("readyz"))[0] == OK
    answers = {header: await scraped(operator, header) for header in (*wanted, "")}
    assert answers == wanted | {"": UNAUTHORIZED}


async def scraped(operator: Operator, header: str) -> int:
    headers = {"Authorization": header} if header else {}
    url = f"http://127.0.0.1:{operator.port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as page:
        await page.read()
        return page.status
