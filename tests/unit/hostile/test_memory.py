"""What a hostile author can make the operator remember, compared with what ordinary jobs take."""

from __future__ import annotations

import gc
import json
import logging
import tracemalloc
from typing import Any

import pytest

from ddpjob_operator.cluster.cache import Cache
from ddpjob_operator.cluster.owners import Key
from ddpjob_operator.runtime.decode import decode
from ddpjob_operator.wire.jobs import InvalidJob, parse_job

JOBS = 1
ETCD_BYTES = 1_400_000
"""Nearly the most that etcd takes of one object."""

SLACK = 16_384
"""Bytes for each job, where its text takes 1.4 MB."""


def template(field: str, item: str) -> str:
    items = ",".join([item] * (ETCD_BYTES // (len(item) + 1)))
    return f'"podTemplate":{{"spec":{{"{field}":[{items}]}}}}'


SMALL = '{"name":"a"}'
ORDINARY = '{"nodes":2,"podTemplate":{"spec":{"nodeSelector":{"gpu":"a100"}}}}'
LARGEST: dict[str, str] = {
    "empty lists": f"{{{template('volumes', '[]')}}}",
    "small objects": f"{{{template('containers', SMALL)}}}",
    "deep": '{"podTemplate":{"spec":' + '{"a":' * 9_900 + "1" + "}" * 9_900 + "}}",
    "of another controller": f'{{"managedBy":"else",{template("volumes", "[]")}}}',
    "a source": '{"env":[{"name":"A","valueFrom":{"a":[' + ",".join(["{}"] * (ETCD_BYTES // 3)) + "]}}]}",
}


def job(number: int, spec: str, metadata: str = "") -> dict[str, Any]:
    names = f'"name":"j{number}","namespace":"a","uid":"u{number}","resourceVersion":"{number + 1}"'
    found: dict[str, Any] = decode(f'{{"metadata":{{{names}{metadata}}},"spec":{spec}}}'.encode())
    return found


def bytes_kept(spec: str, metadata: str = "") -> int:
    """Bytes that a cache holds of jobs with this spec, after the answers that brought them are gone."""
    gc.freeze()  # for good, or each collection goes through what all tests before have left
    tracemalloc.start()
    try:
        cache = Cache()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(JOBS):
            cache.put_job(job(number, spec, metadata))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert len(cache._jobs) == JOBS
    finally:
        tracemalloc.stop()
    return after - before


@pytest.fixture(autouse=True)
def _no_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # pytest keeps each record, which would count


@pytest.mark.parametrize("kind", LARGEST)
def test_a_job_of_any_size_takes_hardly_more_than_an_ordinary_one(kind: str) -> None:
    assert bytes_kept(LARGEST[kind]) < bytes_kept(ORDINARY) + JOBS * SLACK


def test_annotations_and_managed_fields_are_not_remembered() -> None:
    annotation = json.dumps("x" * 200_000)
    metadata = (
        f',"annotations":{{"kubectl.kubernetes.io/last-applied-configuration":{annotation}}},"managedFields":[{{}}]'
    )
    assert bytes_kept(ORDINARY, metadata) < bytes_kept(ORDINARY) + JOBS * SLACK


@pytest.mark.parametrize("kind", ["empty lists", "small objects", "deep", "a source"])
def test_what_is_not_remembered_is_refused_all_the_same(kind: str) -> None:
    cache = Cache()
    cache.put_job(job(0, LARGEST[kind]))
    seen = cache.job(Key("a", "j0"))
    assert seen is not None
    with pytest.raises(InvalidJob) as refused:
        parse_job(seen)
    assert refused.value.problems[0].startswith(("spec.podTemplate: has more", "spec.env: has more"))
