"""What every API model shares: camelCase outside, snake_case inside, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?$")]
"""A DNS label short enough that every child's name still fits in 63 characters."""

PluginName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$", max_length=253)]
"""An entry point name (`react`) or an import path (`my_pkg.tasks:MyTask`)."""


class ApiModel(BaseModel):
    """Base of every manifest model."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
