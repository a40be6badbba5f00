"""`python -m rljob_operator.view.curve ARTIFACTS TARGET.png`: reward per step and validation with its intervals."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_operator.view.facts import Score
from rljob_operator.view.metrics import read_lines, read_scores


def main(artifacts: Path, target: Path) -> int:
    """Draw; nothing is written where nothing was trained or scored."""
    steps, scores = read_lines(artifacts / "metrics" / "steps.jsonl"), read_scores(artifacts, {})
    if not steps and not scores:
        return 0
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [line["step"] for line in steps],
        [line["reward_mean"] for line in steps],
        label="reward of the batch",
        color="tab:blue",
    )
    if scores:
        axes.errorbar(
            [score.step for score in scores],
            [score.score for score in scores],
            _errors(scores),
            fmt="o",
            capsize=4,
            color="tab:orange",
            label="validation (95 %)",
        )
    axes.set(xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)
    return 0


def _errors(scores: list[Score]) -> list[list[float]]:
    """[below, above] each score; 0 where the interval is not known."""
    below = [score.score - score.low if score.low is not None else 0.0 for score in scores]
    above = [score.high - score.score if score.high is not None else 0.0 for score in scores]
    return [below, above]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
