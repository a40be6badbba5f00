"""`python -m dashboards`: write the chart's dashboards anew. A test holds the files and this package together."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import rollout_completion, sandboxes

TARGET = Path(__file__).parents[1] / "charts" / "rljob" / "dashboards"
"""Where the chart looks for them."""
BUILDERS = {
    "rollout-completion": rollout_completion.dashboard,
    "sandboxes": sandboxes.dashboard,
}
"""File name → what makes its dashboard."""


def rendered() -> dict[str, str]:
    """File name → JSON, as it should lie in the chart."""
    return {
        f"{name}.json": json.dumps(make().build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for name, make in BUILDERS.items()
    }


def main() -> None:
    """Write every dashboard."""
    TARGET.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (TARGET / name).write_text(text)


if __name__ == "__main__":
    main()
