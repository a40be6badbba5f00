"""SandboxPool objects: the pool manager keeps their pods, the operator writes only the spec."""

from __future__ import annotations

from rljob import labels
from rljob.api.rljob_types import API_VERSION
from rljob_operator.observed import Object
from rljob_operator.render.context import Context

KIND = "SandboxPool"


def pools(context: Context) -> list[Object]:
    """One per pool of the manifest."""
    return [
        context.child(
            API_VERSION,
            KIND,
            pool.name,
            "sandbox",
            {"spec": pool.model_dump(mode="json", exclude={"name"}, exclude_none=True)},
            {labels.POOL: pool.name},
        )
        for pool in context.job.spec.sandbox_pools
    ]
