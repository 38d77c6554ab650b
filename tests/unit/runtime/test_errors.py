"""What a refusal of the API server means."""

from __future__ import annotations

import pytest

from ddpjob_operator.runtime.errors import ApiError

OF_ROLES = 'pods is forbidden: User "a" cannot create resource "pods" in API group "" in the namespace "ml"'
OF_A_WEBHOOK = 'admission webhook "guard" denied the request: a team cannot claim this resource here'
OF_A_QUOTA = 'pods "a" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0'


@pytest.mark.parametrize(("message", "lacks"), [(OF_ROLES, True), (OF_A_WEBHOOK, False), (OF_A_QUOTA, False)])
def test_a_right_that_is_missing_is_told_from_what_admission_refuses(message: str, lacks: bool) -> None:
    assert ApiError(403, "Forbidden", message).lacks_right is lacks
