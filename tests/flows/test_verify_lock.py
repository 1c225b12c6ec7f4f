"""A locked pipeline that is run again is equal, or the stage that is not is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from engines import runs
from flows.verify_lock import judged, locked_leg
from model_specs.errors import ArtifactError
from tests.flows.command_line import SHORT, CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def flip_byte(path: Path, index: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(bytes(content))


def stages(stdout: str, word: str) -> list[tuple[str, str]]:
    """What the command says of each output: `again train 1-1 chain`."""
    return re.findall(rf"^  {word} +(kept|again) +(.*) \S+$", stdout, re.MULTILINE)


OUTPUTS = [
    *("download data", "download model", "convert dcp"),
    *("train 1-4 chain", "train 1-4 state", "checkpoint 4 checkpoint"),
    *("train 5-8 chain", "train 5-8 state", "checkpoint 8 checkpoint", "export export"),
]
KEPT = [("kept", output) for output in OUTPUTS if not output.endswith("state")]
AGAIN = [("again", output) for output in OUTPUTS]
"""What is still there is read again, and then all is made again."""


@pytest.mark.exhaustive
def test_edited_outputs_are_named_and_no_other_stage_is(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    edited = lockstep.runs_dir / "edited"
    left_out = shutil.ignore_patterns("verify", "b", "tensors")
    shutil.copytree(twin_folder, edited, ignore=left_out)
    (weights,) = (edited / "a" / "export").glob("*.safetensors")
    flip_byte(weights, -5)
    kept = sorted((edited / "a" / "checkpoints" / "step-000004").glob("*.distcp"))
    flip_byte(kept[0], kept[0].stat().st_size // 2)
    ended = lockstep("verify", "edited")
    assert ended.code == 10, ended
    assert "\nDiverged\n" in ended.stdout
    wrong = [("kept", "checkpoint 4 checkpoint"), ("kept", "export export")]
    assert stages(ended.stdout, "DIFFERS") == wrong
    assert stages(ended.stdout, "equal") == [x for x in [*KEPT, *AGAIN] if x not in wrong]
    digests = r"stage export: export: locked ([0-9a-f]{32}), found ([0-9a-f]{32})"
    found = re.search(digests, ended.stdout)
    assert found is not None, ended
    assert found[1] != found[2]
    assert runs.legs(edited) == ("a",)


@pytest.mark.exhaustive
def test_every_stage_of_a_lock_is_run_again_and_equal(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    ended = lockstep("verify", str(twin_folder / "b" / "lock.json"))
    assert ended.code == 0, ended
    assert "\nIdentical\n" in ended.stdout
    assert stages(ended.stdout, "DIFFERS") == []
    assert stages(ended.stdout, "equal") == [*KEPT, *AGAIN]


@pytest.mark.exhaustive
def test_a_changed_input_is_named_by_the_stage_that_takes_it(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    model = lockstep.runs_dir.parent / "model of one's own"
    shutil.copytree(twin_folder / "a" / "model", model)
    (model / "manifest.json").unlink()
    few = ("--set", "plan.num_steps=1", "--set", f"model.path={model}")
    ended = lockstep("run", "tiny_cpu", "--run-id", "own", *few, *SHORT)
    assert ended.code == 0, ended
    flip_byte(next(model.glob("*.safetensors")), -1)
    again = lockstep("verify", "own")
    assert again.code == 10, again
    assert "stage download failed: " in again.stdout
    assert "model.weights_digest" in again.stdout


def test_a_folder_without_a_spec_is_refused(twin_folder: Path, tmp_path: Path) -> None:
    shutil.copy(twin_folder / "a" / "lock.json", tmp_path)
    with pytest.raises(ArtifactError, match=r"has no spec\.json beside its lock"):
        locked_leg(str(tmp_path / "lock.json"), "a", tmp_path)
    assert locked_leg("twin", "a", twin_folder.parent) == (twin_folder / "a").resolve()


def test_nothing_to_compare_is_vacuous() -> None:
    from engines.provenance.verdict import Verdict
    from tasks.compare import LegResult

    result = judged(LegResult.failed("a", "r", verdict=Verdict.ALIGNED), [])
    assert result.verdict is Verdict.VACUOUS
