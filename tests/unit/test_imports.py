"""The border between driver and engine processes, watched where it counts: in `sys.modules`.

A static rule sees only the imports of our own files; here a fresh interpreter imports the modules
and then says which of the heavy packages it has loaded, through whatever chain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PACKAGES = ("torch", "ray", "vllm", "megatron")
DRIVER_MODULES = (
    "engines.contracts",
    "engines.seeds",
    "engines.loop",
    "engines.cluster",
    "engines.host",
    "engines.faults",
    "engines.train.advantages",
    "engines.train.group",
    "engines.rollout.group",
    "engines.gates.logprobs",
    "engines.drill.bench",
    "engines.drill.catalogue",
    "engines.drill.in_driver",
    "engines.drill.live",
)


def modules_of(package: str, *, root: Path = ROOT) -> list[str]:
    """All importable modules of a package, by file."""
    found = []
    for file in sorted((root / package.replace(".", "/")).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def run_python(program: str, *arguments: str, root: Path = ROOT) -> str:
    """Run a program in a fresh interpreter that sees `root` first; return its last line."""
    program = f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def loaded_by(
    modules: Sequence[str], forbidden: Sequence[str], *, root: Path = ROOT
) -> dict[str, list[str]]:
    """Import the modules one after another; say which brought in which forbidden packages."""
    program = """
import importlib, json
forbidden, *modules = sys.argv[1:]
found, seen = {}, set()
for module in modules:
    importlib.import_module(module)
    new = {name for name in json.loads(forbidden) if name in sys.modules} - seen
    if new:
        found[module] = sorted(new)
    seen |= new
print(json.dumps(found))
"""
    return json.loads(run_python(program, json.dumps(list(forbidden)), *modules, root=root))


def shadowing(files: Iterable[Path]) -> list[str]:
    """Files whose stem is the name of a standard module or of an installed import package."""
    taken = sys.stdlib_module_names | packages_distributions().keys()
    return [str(file) for file in files if file.stem in taken and file.stem != "__init__"]


def test_no_module_of_flows_loads_an_engine_package() -> None:
    modules = modules_of("flows")
    assert "flows.cli" in modules
    assert loaded_by(modules, ENGINE_PACKAGES) == {}


def test_no_module_of_tasks_loads_an_engine_package() -> None:
    assert loaded_by(modules_of("tasks"), ENGINE_PACKAGES) == {}


def test_the_driver_side_of_engines_loads_no_torch() -> None:
    provenance = [
        name for name in modules_of("engines.provenance") if not name.endswith(".tensor_digest")
    ]
    assert len(provenance) > 1
    modules = [*DRIVER_MODULES, *provenance, *modules_of("engines.rewards")]
    assert loaded_by(modules, ("torch", "vllm", "megatron", "prefect", "mlflow")) == {}


def test_model_specs_loads_no_heavy_package() -> None:
    forbidden = (*ENGINE_PACKAGES, "prefect", "mlflow", "transformers", "numpy")
    assert loaded_by(modules_of("model_specs"), forbidden) == {}


def test_the_command_line_loads_no_prefect_when_imported() -> None:
    assert loaded_by(["flows.cli"], ("prefect", "mlflow", *ENGINE_PACKAGES)) == {}


@pytest.mark.parametrize("arguments", [["diff", "no-such-run-a", "no-such-run-b"], ["doctor"]])
def test_diff_and_doctor_load_no_prefect(arguments: list[str]) -> None:
    program = """
import importlib, json
from flows.cli import main
sys.argv = ["lockstep", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as stopped:
    print("exit code", stopped.code)
print(json.dumps([name for name in ("prefect", "mlflow") if name in sys.modules]))
"""
    assert json.loads(run_python(program, json.dumps(arguments))) == []


def test_an_offending_package_is_named(tmp_path: Path) -> None:
    package = tmp_path / "offender"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "clean.py").write_text("import json\n")
    (package / "inner" / "indirect.py").write_text("import heavy_thing\n")
    (tmp_path / "heavy_thing.py").write_text("")
    modules = modules_of("offender", root=tmp_path)
    assert modules == ["offender", "offender.clean", "offender.inner", "offender.inner.indirect"]
    found = loaded_by(modules, ("heavy_thing", "torch"), root=tmp_path)
    assert found == {"offender.inner.indirect": ["heavy_thing"]}


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("model_specs/a.py", "import torch", "model_specs is pydantic models and nothing else"),
        ("engines/a.py", "import prefect", "engines knows neither Prefect nor MLflow"),
        ("engines/a.py", "import tasks", "Imports go downwards only"),
        ("flows/a.py", "import ray", "flows touches no engine package itself"),
        ("flows/a.py", "import tasks", None),
    ],
)
def test_the_import_contracts_go_red(
    tmp_path: Path, file: str, line: str, broken: str | None
) -> None:
    for package in ("flows", "tasks", "engines", "model_specs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / file).write_text(line + "\n")
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--config", ROOT / "pyproject.toml", "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    red = [text for text in done.stdout.splitlines() if text.endswith(" BROKEN")]
    assert red == ([f"{broken} BROKEN"] if broken else [])
    assert done.returncode == (1 if broken else 0)


def test_no_file_of_flows_or_tasks_shadows_another_module() -> None:
    # A workflow server that loads a flow by its file puts that folder first on the path.
    files = [file for name in ("flows", "tasks") for file in sorted((ROOT / name).iterdir())]
    assert files
    assert shadowing(file for file in files if file.suffix == ".py" or file.is_dir()) == []


def test_a_shadowing_file_is_named() -> None:
    files = [Path("flows/ray.py"), Path("flows/json.py"), Path("flows/cli.py"), Path("tasks/torch")]
    assert shadowing(files) == ["flows/ray.py", "flows/json.py", "tasks/torch"]
