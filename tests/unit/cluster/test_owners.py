"""Whose an object is."""

from __future__ import annotations

from ddpjob_operator.cluster.owners import Key, key_of_pod


def test_a_pod_leads_to_the_name_of_its_job_whichever_life_it_is_from() -> None:
    reference = {"kind": "DDPJob", "name": "digits", "uid": "job-0", "controller": True}
    pod = {"metadata": {"name": "digits-0-0", "namespace": "ns", "ownerReferences": [reference]}}
    assert key_of_pod(pod) == Key("ns", "digits")
