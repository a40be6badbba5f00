"""The operator's calls to the API server: counted, fenced by the lease, and what a 403 means.

a write ─► do we still lead? ─► call ─► counted by method and code
403     ─► may we at all (SelfSubjectAccessReview)? no: MissingPermissionError, with verb and place
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

from rljob.kube.client import KubeClient
from rljob.kube.config import KubeConfig
from rljob.kube.errors import ForbiddenError
from rljob.kube.lease import LeaseLostError
from rljob.kube.resources import ACCESS_REVIEW, Object, Resource
from rljob_operator import operator_metrics as metrics


class MissingPermissionError(ForbiddenError):
    """The operator's role lacks a verb; the message names verb, resource and namespace."""


def fenced_client(
    config: KubeConfig,
    leads: Callable[[], bool],
    transport: httpx.AsyncBaseTransport | None = None,
) -> KubeClient:
    """A client that writes only while `leads()`: a process that lost its lease must not act, not even unknowingly."""

    def before_write() -> None:
        if not leads():
            raise LeaseLostError("this replica leads no more and must not write")

    def on_answer(method: str, status: int) -> None:
        metrics.API_REQUESTS.inc(method=method, code=str(status))

    return KubeClient(
        config,
        user_agent="rljob-operator",
        transport=transport,
        before_write=before_write,
        on_answer=on_answer,
    )


async def may(
    client: KubeClient, verb: str, resource: Resource, namespace: str | None, subresource: str = ""
) -> bool:
    """Whether we may do this; without a namespace, in all of them. Raises KubeError."""
    attributes = {
        "verb": verb,
        "group": resource.group,
        "resource": resource.plural,
        "subresource": subresource,
        "namespace": (namespace or "") if resource.namespaced else "",
    }
    review: Object = {"apiVersion": ACCESS_REVIEW.api_version, "kind": ACCESS_REVIEW.kind}
    review["spec"] = {
        "resourceAttributes": {key: value for key, value in attributes.items() if value}
    }
    answer = await client.call("POST", ACCESS_REVIEW.path(), body=review)
    return bool((answer.get("status") or {}).get("allowed"))


async def why_forbidden(
    client: KubeClient, error: ForbiddenError, verb: str, resource: Resource, namespace: str | None
) -> ForbiddenError:
    """Tell a missing verb from what quota and admission refuse, which is a 403 as well. Raises KubeError."""
    if await may(client, verb, resource, namespace):
        return error
    where = f"in namespace {namespace}" if namespace else "in the cluster"
    message = (
        f"the operator may not {verb} {plural_name(resource)} {where}: its role lacks the verb"
    )
    return MissingPermissionError(error.status, "MissingPermission", message, error.details)


def plural_name(resource: Resource, subresource: str = "") -> str:
    """`jobs.batch`, as RBAC messages name it; `rljobs/status.rljob.dev` with a subresource."""
    name = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return f"{name}.{resource.group}" if resource.group else name
