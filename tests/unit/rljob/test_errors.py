"""Every error of ours says whether to retry, and survives the way between two processes."""

import pickle
import re

import pytest

from rljob import errors
from rljob.errors import InfraError, ManifestError, RLJobError, UserError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, RLJobError)
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_an_error_pickles_and_is_drawn_in_the_tree(error: type[RLJobError]) -> None:
    made = error("spec.x", "is wrong", "fix it") if issubclass(error, UserError) else error("no")
    back = pickle.loads(pickle.dumps(made))
    assert (type(back), back.args, str(back)) == (error, made.args, str(made))
    assert re.search(rf"\b{error.__name__}\b", errors.__doc__ or "")
    assert error.__doc__


def test_a_user_error_is_one_line_with_path_problem_and_fix() -> None:
    error = ManifestError("spec.rollout.groupSize", "must be at least 2", "raise it")
    assert str(error) == "spec.rollout.groupSize: must be at least 2; raise it"
    assert str(ManifestError("spec", "is empty")) == "spec: is empty"
    assert error.exit_code == 2


def test_what_is_retried_is_never_the_users_fault() -> None:
    assert not [
        error for error in CLASSES if issubclass(error, InfraError) and issubclass(error, UserError)
    ]
