"""`python -m rljob_operator.view.curve ARTIFACTS TARGET.png`: reward per step and validation with its intervals."""

from __future__ import annotations

import sys
from pathlib import Path

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
        errors = [
            [
                score.score - (score.low if score.low is not None else score.score)
                for score in scores
            ],
            [
                (score.high if score.high is not None else score.score) - score.score
                for score in scores
            ],
        ]
        axes.errorbar(
            [s.step for s in scores],
            [s.score for s in scores],
            errors,
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
