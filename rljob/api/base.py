"""What every API model shares: camelCase outside, snake_case inside, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?$", max_length=53)]
"""A DNS label."""

JOB_NAME = "^[a-z]([-a-z0-9]{0,42}[a-z0-9])?$"
JobName = Annotated[str, Field(pattern=JOB_NAME, max_length=44)]
"""A DNS label that starts with a letter, as a Service's name must, and is short enough for every child: a StatefulSet
named `JOB-rollout` has pods only up to 52 characters, because they carry its name and a hash in one label."""

Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", max_length=63)]
"""A Kubernetes namespace."""

ObjectName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", max_length=253)
]
"""The name of another Kubernetes object, such as a Secret or a RuntimeClass."""

PluginName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?$", max_length=253)
]
"""An entry point name (`react`) or an import path (`my_pkg.tasks:MyTask`)."""

Image = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=512)]
"""A container image's name."""

ENV_NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
EnvVars = Annotated[
    dict[
        Annotated[str, Field(pattern=ENV_NAME, max_length=256)],
        Annotated[str, Field(max_length=32_768)],
    ],
    Field(max_length=64),
]
"""Environment variables."""

Quantities = Annotated[dict[str, Any], Field(max_length=8)]
"""Kubernetes resource requirements: `limits`, `requests`, `claims`."""

LABEL_KEY = (
    "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
_LabelKey = Annotated[str, Field(pattern=LABEL_KEY, max_length=317)]

LabelMap = Annotated[
    dict[
        _LabelKey,
        Annotated[
            str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)
        ],
    ],
    Field(max_length=32),
]
"""Kubernetes labels."""

AnnotationMap = Annotated[
    dict[
        _LabelKey,
        Annotated[str, Field(max_length=4096)],
    ],
    Field(max_length=32),
]
"""Kubernetes annotations."""

FolderPath = Annotated[str, Field(pattern=r"^(/[^/:\x00-\x1f$]+)+$", max_length=256)]
"""An absolute path without a slash at its end; a mount cannot have a colon in it."""

FreeObject = Annotated[dict[str, Any], Field(max_length=16)]
"""A piece of a Kubernetes object."""

Options = Annotated[dict[str, Any], Field(max_length=32)]
"""Keyword arguments of a plugin: any JSON."""

PodTemplate = Annotated[dict[str, Any], Field(max_length=32)]
"""`metadata` and `spec` of a pod template, of which only what differs is given."""

FREE_FORM = frozenset({"egressRules", "options", "resources", "template", "tolerations"})
"""Keys whose contents rljob hands on unread."""

HANGS: dict[str, Any] = {"x-rljob-hangs": True}
"""`json_schema_extra` of a field whose meaning hangs on another key: its default is left out of the CRD, so that the
API server does not write a key into a manifest that is refused there."""


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
