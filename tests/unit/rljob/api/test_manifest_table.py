"""What `rljob validate` says of every manifest of the table; the e2e suite asks a real API server the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob.api.effects import resolved
from rljob.api.load import check
from rljob.api.source import Source
from rljob.errors import ManifestError
from tests.harness.manifests import Case, cases


@pytest.mark.parametrize("case", cases("cases"), ids=lambda case: case.name)
def test_validate_judges_every_manifest_of_the_table(case: Case, tmp_path: Path) -> None:
    source = Source("m", case.manifest, {})
    wanted = case.refused or case.validate
    if wanted is None:
        job = check(source, tmp_path)
        again = check(Source("m", resolved(job), {}), tmp_path)
        assert resolved(again) == resolved(job)
        return
    with pytest.raises(ManifestError) as error:
        check(source, tmp_path)
    lines = str(error.value).splitlines()
    assert any(line.removeprefix("m: ").startswith(wanted) for line in lines), lines


def test_the_table_is_wide() -> None:
    table = cases("cases")
    assert len(table) >= 60
    assert len({case.name for case in table}) == len(table)
    assert sum(case.refused is None and case.validate is None for case in table) >= 15
