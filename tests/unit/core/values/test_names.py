"""Names and labels that are deterministic, valid and never collide."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.core.values.names import dns_label, job_labels, pod_labels, pod_name, pvc_name, service_name

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035
VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

subdomains = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,80}[a-z0-9])?", fullmatch=True)
attempts, ranks = st.integers(0, 999_999), st.integers(0, 1023)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("digits", "digits", id="a plain name stays as it is"),
        pytest.param("a" * 51, "a" * 51, id="the longest plain name stays as it is"),
    ],
)
def test_a_short_name_can_be_read_in_the_names_of_its_pods(name: str, expected: str) -> None:
    assert pod_name(name, 3, 7) == f"{expected}-3-7"


@pytest.mark.parametrize("name", ["7b-model", "a.b", "a" * 52, "a" * 253, "1", "0.0"])
def test_a_name_that_is_no_label_is_shortened_and_marked(name: str) -> None:
    assert re.fullmatch(r".+-[0-9a-f]{8}", dns_label(name, 51))


@pytest.mark.fault(42)
@given(subdomains, attempts, ranks)
def test_every_name_and_label_is_valid(job: str, attempt: int, rank: int) -> None:
    for name in (pod_name(job, attempt, rank), service_name(job), pvc_name(job)):
        assert LABEL.fullmatch(name), name
    for value in (job_labels(job, "0b0c-uid") | pod_labels(attempt, rank)).values():
        assert VALUE.fullmatch(value), value


@given(st.tuples(subdomains, attempts, ranks), st.tuples(subdomains, attempts, ranks))
def test_two_pods_never_share_a_name(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert (pod_name(*one) == pod_name(*other)) == (one == other)


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("a", 1, 0), ("a-1", 0, 0), id="a job named like another's attempt"),
        pytest.param(("a-1", 1, 0), ("a", 11, 0), id="digits that could move across a dash"),
        pytest.param(("a.b", 0, 0), ("a-b", 0, 0), id="a dot and a dash"),
        pytest.param(("a" * 52, 0, 0), ("a" * 53, 0, 0), id="long names with one beginning"),
    ],
)
def test_names_that_look_alike_stay_apart(one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    assert pod_name(*one) != pod_name(*other)
    if one[0] != other[0]:
        assert service_name(one[0]) != service_name(other[0])
        assert pvc_name(one[0]) != pvc_name(other[0])
        assert job_labels(one[0], "u") != job_labels(other[0], "u")
