"""`$(NAME)` reads as in Kubernetes: the cases are those of its own expand_test.go."""

from __future__ import annotations

import pytest

from ddpjob_operator.local.expansion import expand

VARIABLES = {"VAR_A": "A", "VAR_B": "B", "VAR_C": "C", "VAR_REF": "$(VAR_A)", "VAR_EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(VAR_A)", "A"),
        ("___$(VAR_B)___", "___B___"),
        ("$(VAR_A)_$(VAR_B)", "A_B"),
        ("$(VAR_A)$(VAR_B)", "AB"),
        ("$(VAR_REF)", "$(VAR_A)"),
        ("foo$(VAR_EMPTY)bar", "foobar"),
        ("$(VAR_DNE)", "$(VAR_DNE)"),
        ("$$(VAR_A)", "$(VAR_A)"),
        ("$$$(VAR_A)", "$A"),
        ("$$$$(VAR_A)", "$$(VAR_A)"),
        ("f000-$$VAR_A", "f000-$VAR_A"),
        ("foo\\$(VAR_C)bar", "foo\\Cbar"),
        ("$(foo$$var)", "$(foo$$var)"),
        ("$VAR_A", "$VAR_A"),
        ("$", "$"),
        ("$?", "$?"),
        ("foo$(", "foo$("),
        ("$(VAR_A", "$(VAR_A"),
        ("$()", "$()"),
        ("\n", "\n"),
    ],
)
def test_references_expand_as_the_kubelet_expands_them(text: str, expanded: str) -> None:
    assert expand(text, VARIABLES) == expanded
