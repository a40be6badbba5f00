import pytest

from rljob.errors import MachineError
from rljob_operator.config import load_config, load_key

IMAGES = (
    "images: {trainer: a, rollout_worker: b, services: c, engine: d, sandbox_pool: e, sandbox: f}\n"
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "operator.yaml"


def test_images_alone_make_a_configuration(file):
    file.write_text(IMAGES)
    config = load_config(file)
    assert (config.images.trainer, config.namespaces) == ("a", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (IMAGES + "image_pul_policy: Always", "unknown field `image_pul_policy`"),
        ("images: {trainer: 1}", "images.trainer: expected `str`, got `int`"),
        ("images: {}", "images: object missing required field"),
        ("", "expected `object`, got `null`"),
        ("a: [", "is not YAML"),
        (IMAGES + "namespaces: [Team]", "namespaces[0]: 'Team' is no name of a namespace"),
        (IMAGES + "operator_namespace: ''", "operator_namespace: '' is no name of a namespace"),
    ],
)
def test_a_fault_is_one_line_with_the_file_and_the_key(file, text, said):
    file.write_text(text)
    with pytest.raises(MachineError) as caught:
        load_config(file)
    line = str(caught.value)
    assert said in line
    assert line.startswith(str(file))
    assert "\n" not in line


def test_a_missing_file_and_a_missing_key_say_so(tmp_path):
    with pytest.raises(MachineError, match="cannot be read"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(MachineError, match="rljob-keys"):
        load_key(tmp_path, "broker_key")


def test_a_short_key_is_refused_and_a_newline_at_its_end_is_not_part_of_it(tmp_path):
    (tmp_path / "broker_key").write_text("short\n")
    with pytest.raises(MachineError, match="fewer than 16"):
        load_key(tmp_path, "broker_key")
    (tmp_path / "broker_key").write_text("0123456789abcdef\n")
    assert load_key(tmp_path, "broker_key") == b"0123456789abcdef"
