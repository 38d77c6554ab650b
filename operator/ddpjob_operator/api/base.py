"""What every model of the API shares: camelCase on the wire, snake_case in Python, frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class APIModel(BaseModel):
    """A part of a DDPJob. Unknown fields are dropped here and refused where a person's file is read (`wire.jobs`)."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )


OF_KUBERNETES = "x-of-kubernetes"
"""Marks a field that has a type of Kubernetes, by its name in core/v1: the CRD gets that type's schema."""
