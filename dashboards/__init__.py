"""Dashboards as code: `python -m dashboards` writes the JSON that the chart ships.

    panels.py (how ours look) ─┬► rollout_completion.py ─► charts/rljob/dashboards/rollout-completion.json
                               └► sandboxes.py ──────────► charts/rljob/dashboards/sandboxes.json

A source package of this tree; nothing installs it.
"""
