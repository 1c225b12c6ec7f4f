"""What is shipped, what is declared, and what a committed file must not say.

The wheel is built from a copy of the packages, never in the checkout, where a stale `build` folder
would end up in it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.acceptance.wheel_environment import build_wheel

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"flows", "tasks", "engines", "model_specs"}
NOT_OURS = {"build", "dist", "runs", "mlruns", "__pycache__"}
# Built on the machine, or brought by torch: used where they can be imported, listed nowhere.
OPTIONAL_IMPORTS = {"deep_ep", "deep_gemm", "flashinfer", "triton"}
# Put together from pieces, so that this file does not say what it forbids.
REGISTRIES = (r"py" + r"pi\.org", "python" + "hosted", r"download\.py" + "torch")
FOLDERS = ("wo" + "rk/", "roo" + "t/", "op" + "t/wheels", "op" + "t/pypi")
UNWANTED = {
    "a registry host": "|".join(REGISTRIES),
    "a path of one machine": rf"(?<![\w.~-])/(?:{'|'.join(FOLDERS)})",
    "a local file address": "file:" + "///",
    "material outside the repository": r"\.\./" + "shared",
}


def project() -> dict:
    """The parsed `pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def own_files(root: Path) -> list[Path]:
    """All files that are, or could be, committed."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        return [root / name for name in listed if name and (root / name).is_file()]
    # An unpacked archive has no index: all but hidden folders, environments and build products.
    return [
        file
        for file in root.rglob("*")
        if file.is_file()
        and not NOT_OURS & set(file.relative_to(root).parts)
        and not any(part.startswith(".") for part in file.relative_to(root).parts[:-1])
    ]


def unwanted_in(files: list[Path]) -> list[str]:
    """`path:line: what` for every line of a text file that says something it must not."""
    patterns = {what: re.compile(pattern) for what, pattern in UNWANTED.items()}
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # An image or another binary: it has no lines.
        for number, line in enumerate(lines, start=1):
            found += [f"{file}:{number}: {what}" for what, p in patterns.items() if p.search(line)]
    return found


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel that is built from a copy of the project."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_the_four_packages_and_no_tests(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == PACKAGES
    assert not [name for name in wheel_files if "test" in name.lower() and name.endswith(".py")]


def test_every_module_of_the_four_packages_is_in_the_wheel(wheel_files: set[str]) -> None:
    # A sub-package without `__init__.py` would be missing here.
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    sources = {file.relative_to(ROOT).as_posix() for file in files}
    assert len(sources) > len(PACKAGES)
    assert sources - wheel_files == set()


def test_every_data_file_of_the_four_packages_is_in_the_wheel(wheel_files: set[str]) -> None:
    shipped = {
        file.relative_to(ROOT).as_posix()
        for file in own_files(ROOT)
        if file.relative_to(ROOT).parts[0] in PACKAGES
    }
    assert shipped - wheel_files == set()


def test_the_wheel_carries_what_makes_the_pinned_environment(wheel_files: set[str]) -> None:
    data = re.compile(r"[^/]+\.data/data/share/lockstep/")
    carried = {data.sub("", name) for name in wheel_files if data.match(name)}
    needed = {
        file.relative_to(ROOT).as_posix()
        for file in own_files(ROOT)
        if file.relative_to(ROOT).parts[0] in ("constraints", "setup")
    }
    assert carried == {*needed, "tools/setup.sh"}


def test_the_wheel_carries_licence_and_readme(wheel_files: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)
    assert project()["project"].get("readme") == "README.md"


def test_the_four_names_belong_to_this_distribution_alone() -> None:
    owners = packages_distributions()
    assert {name: set(owners[name]) for name in PACKAGES} == {
        name: {"lockstep-rl"} for name in PACKAGES
    }


def test_the_command_and_the_plugin_are_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="lockstep")
    (plugin,) = entry_points(group="vllm.general_plugins", name="lockstep")
    assert command.value == "flows.cli:main"
    assert callable(command.load())
    module, _, function = plugin.value.partition(":")
    # Read, not loaded: the plugin's module may import vllm.
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert re.search(rf"^def {function}\(", source, re.MULTILINE)


def test_every_requirement_of_the_cpu_environment_is_pinned() -> None:
    lines = (ROOT / "constraints" / "cpu-py311.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    declared = project()["project"]
    extras = declared["optional-dependencies"]
    of_extras = [text for name in ("cpu", "cpu-without-vllm", "dev") for text in extras[name]]
    requirements = [Requirement(text) for text in (*declared["dependencies"], *of_extras)]
    ours = [r for r in requirements if canonicalize_name(r.name) != "lockstep-rl"]
    assert len(ours) > 20
    for requirement in ours:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def undeclared_imports(files: list[Path], declared: set[str]) -> set[str]:
    """Import packages, anywhere in the files, that no declared distribution provides."""
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    owners = packages_distributions()
    foreign = imported - sys.stdlib_module_names - PACKAGES - OPTIONAL_IMPORTS
    return {
        name
        for name in foreign
        if not {canonicalize_name(owner) for owner in owners.get(name, [])} & declared
    }


def test_every_import_of_the_four_packages_is_declared(tmp_path: Path) -> None:
    extras = project()["project"]["optional-dependencies"]
    extra = [*extras["cpu"], *extras["cpu-without-vllm"], *extras["cuda"]]
    texts = [*project()["project"]["dependencies"], *extra]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    assert undeclared_imports(files, declared) == set()
    stray = tmp_path / "stray.py"
    stray.write_text("import json, torch\nimport yaml.nodes\nfrom no_such_package import x\n")
    assert undeclared_imports([stray], declared) == {"yaml", "no_such_package"}


def test_no_file_names_a_registry_or_a_machine() -> None:
    files = own_files(ROOT)
    assert ROOT / "pyproject.toml" in files
    assert unwanted_in(files) == []


def test_a_registry_and_a_machine_path_are_found(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text(
        "\n".join(
            (
                "harmless: https://example.com, a/work/of/art, .ci/run, ~/root/x",
                "https://py" + "pi.org/simple",
                "see /wo" + "rk/main",
                "file:" + "///somewhere",
                "as in ../" + "shared/x.md",
            )
        )
    )
    found = unwanted_in([file])
    assert [entry.rsplit(":", 2)[1] for entry in found] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("extra", "file"), [("cpu-without-vllm", "cpu-py311.txt"), ("cuda", "gpu-py312.txt")]
)
def test_what_is_pinned_in_the_project_is_pinned_alike_in_the_constraints(
    extra: str, file: str
) -> None:
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    pins = dict(
        line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0]
    )
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    declared = project()["project"]
    asked = [*declared["dependencies"], *declared["optional-dependencies"][extra]]
    compared = 0
    for requirement in map(Requirement, asked):
        found = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(found.partition("+")[0]), (requirement, found)
        compared += 1
    assert compared == len(asked) > 15
