"""Walking the models behind the fields of a model."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `list[Task]` or `Redis | None`; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_of(part))), None)


def keys_at(root: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """The keys that the model at `path` knows; none where something else lies."""
    model: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        fields = model.model_fields.values() if model else ()
        field = next((field for field in fields if field.alias == part), None)
        model = model_of(field.annotation) if field else None
        if model is None:
            return []
    return [field.alias or name for name, field in model.model_fields.items()] if model else []
