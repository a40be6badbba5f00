"""Names that cross a wire read back as they were written, and nothing else reads at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.ids import EpisodeId, GroupId, PolicyVersion, new_boot_id, new_token

COUNTS = st.integers(0, 10**9)
GROUPS = st.builds(GroupId, st.sampled_from(["t", "v"]), COUNTS, COUNTS)


@given(COUNTS, COUNTS)
def test_a_policy_version_reads_back(incarnation: int, n: int) -> None:
    version = PolicyVersion(incarnation, n)
    assert PolicyVersion.parse(str(version)) == version


@given(GROUPS, COUNTS)
def test_an_episode_reads_back_with_its_group(group: GroupId, member: int) -> None:
    episode = EpisodeId(group, member)
    assert EpisodeId.parse(str(episode)) == episode
    assert GroupId.parse(str(group)) == group


def test_the_written_forms_are_these() -> None:
    assert str(PolicyVersion(2, 17)) == "2-17"
    assert str(EpisodeId(GroupId("t", 12, 0), 3)) == "t12-0.3"
    assert str(EpisodeId(GroupId("v", 5, 17), 0)) == "v5-17.0"


def test_a_training_group_names_its_row_first_and_a_validation_group_its_step() -> None:
    training, validation = GroupId("t", 12, 1), GroupId("v", 5, 17)
    assert (training.row_index, training.is_validation) == (12, False)
    assert (validation.row_index, validation.is_validation) == (17, True)


@pytest.mark.parametrize("text", ["", "t1", "x1-2", "t1-2-3", "t-1-2", "t1-2 ", "T1-2", "t1-2\n"])
def test_what_is_no_group_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a group id"):
        GroupId.parse(text)


@pytest.mark.parametrize("text", ["", "t1-2", "t1-2.", "t1-2.x", "1-2.3"])
def test_what_is_no_episode_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        EpisodeId.parse(text)


@pytest.mark.parametrize("text", ["", "1", "1-2-3", "a-b", "1-"])
def test_what_is_no_policy_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        PolicyVersion.parse(text)


def test_versions_order_by_their_pair() -> None:
    assert PolicyVersion(2, 3) > PolicyVersion(1, 9)
    assert PolicyVersion(2, 4) > PolicyVersion(2, 3)


def test_boot_ids_and_tokens_do_not_repeat() -> None:
    assert len({new_boot_id() for _ in range(1_000)}) == 1_000
    assert len({new_token() for _ in range(1_000)}) == 1_000
    assert len(new_token()) >= 43
