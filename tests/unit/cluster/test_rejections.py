"""What the author of a job reads where the name of a child is taken."""

from __future__ import annotations

import pytest

from ddpjob_operator.cluster.rejections import taken


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"deletionTimestamp": "2030-01-01T12:00:00Z"}, "is still being deleted; this job goes on when it is gone"),
        ({}, "does not belong to this job; delete it, or give the job another name"),
    ],
)
def test_a_name_that_is_about_to_be_free_asks_for_nothing(metadata: dict[str, str], words: str) -> None:
    message = taken("Pod", {"metadata": {"name": "train-0-0", **metadata}}).message
    assert message.startswith("Pod train-0-0 ")
    assert words in message
