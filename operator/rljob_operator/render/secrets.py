"""The Secret J-secrets: made once, then kept, since pods that run hold its values.

| key | what |
| --- | --- |
| `token` | of the job, for broker, gateway control and engine control |
| `redis` | password of the job's own Valkey |
| `valkey.conf` | its settings, so that the password is in no command line |
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from hashlib import sha256

from rljob_operator.observed import Object, Owner
from rljob_operator.render.component import fill
from rljob_operator.render.context import JOB_WIDE, Context
from rljob_operator.render.places import filled
from rljob_operator.render.store import store


def store_password(key: bytes, owner: Owner) -> str:
    """Of a job's own Valkey. Always the same: a Secret that somebody removed comes back as the running pods know it."""
    job = f"rljob store\0{owner.namespace}\0{owner.name}\0{owner.uid}"
    return hmac.new(key, job.encode(), sha256).hexdigest()[:48]


def secret_values(
    context: Context, existing: Mapping[str, str] | None, *, token: str, password: str
) -> dict[str, str]:
    """What the Secret must hold.

    Args:
        context: The job.
        existing: What it holds already; whatever is there stays.
        token: `broker_token.job_token` of the job.
        password: `store_password` of the job, for the case that there is none.
    """
    kept = dict(existing or {})
    values = {"token": kept.get("token") or token}
    if context.own_store:
        values["redis"] = kept.get("redis") or password
        for name, text in store(context.job).files.items():
            values[name] = kept.get(name) or _file(context, text, values)
    return values


def decoded(secret: Object) -> dict[str, str]:
    """Values of a Secret as the API server gives it; one of a person's may hold a keystore beside what is text."""
    data: Mapping[str, str] = secret.get("data") or {}
    return {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}


def secret(context: Context, values: Mapping[str, str]) -> Object:
    """The Secret with these values."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return context.child("v1", "Secret", "secrets", JOB_WIDE, {"type": "Opaque", "data": data})


def _file(context: Context, text: str, values: Mapping[str, str]) -> str:
    component = store(context.job)

    def lookup(kind: str, name: str) -> str:
        place = f"${{{kind}:{name}}}"
        return values[name] if kind == "secret" else filled(context, component, place)

    return fill(text, lookup)
