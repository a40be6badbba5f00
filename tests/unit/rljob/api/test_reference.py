"""The manifest's reference page says what the models say."""

from __future__ import annotations

from pathlib import Path

from rljob.api.reference import render

PAGE = Path(__file__).parents[4] / "docs" / "manifest.md"


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m rljob.api.reference > docs/manifest.md"


def test_every_field_of_the_reference_page_has_a_meaning() -> None:
    assert [line for line in render().splitlines() if line.endswith("|  |")] == []
