"""A live RLJob, as the API server gives it, as our model; or every fault of it, `path: problem; fix`.

The API server has already judged schema and cross-field rules; what is left are the rules that only rljob knows, and
objects that were stored under an older schema.
"""

from __future__ import annotations

from rljob.api.load import ManifestFaultsError, check
from rljob.api.rljob_types import RLJob
from rljob.api.source import Source
from rljob.errors import ManifestError
from rljob_operator.observed import Object

_NAME = "RLJob"


def parse(resource: Object) -> RLJob | list[str]:
    """The job, or its faults.

    Of the metadata only name and namespace are kept: labels and annotations come and go by other hands, and what is
    rendered must not follow them.
    """
    metadata = resource.get("metadata", {})
    manifest = {
        "apiVersion": resource.get("apiVersion"),
        "kind": resource.get("kind"),
        "metadata": {key: metadata[key] for key in ("name", "namespace") if key in metadata},
        "spec": resource.get("spec", {}),
    }
    try:
        return check(Source(_NAME, manifest, {}))
    except ManifestFaultsError as error:
        return [line.removeprefix(f"{_NAME}: ") for line in error.lines]
    except ManifestError as error:
        return [str(error).removeprefix(f"{_NAME}: ")]
