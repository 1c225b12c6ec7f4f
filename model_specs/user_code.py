"""The user's own functions: found by name, loaded, and identified by the bytes of their sources.

A function is named `my_pkg.mod:name` (installed, or in the current folder) or `FILE.py:name`. Its
digest covers every .py file of the topmost package that holds the module, so that a helper beside
it counts; of a module outside of any package, the one file. What it imports from elsewhere is
environment.

Usage::

    code = locate("my_pkg.rewards:score")
    score = load(code)                  # the function
    code.name, code.file, code.digest   # identity is name and digest, not the place
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_specs.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """One function of the user's, by name, place and content."""

    name: str
    """`my_pkg.mod:function`, or `FILE.py:function` without the folder."""
    file: str
    """Absolute path of the module's source."""
    digest: str
    """SHA-256 (hex) over relative paths and bytes of the sources."""


def locate(name: str, *, recorded_file: str | None = None) -> UserCode:
    """Find a function's module and digest its sources, without running the module itself.

    Args:
        name: `my_pkg.mod:function` or `PATH/FILE.py:function`.
        recorded_file: Where the module was found before; taken when it is still there, so that a
            run can be resumed from another folder.

    Raises:
        SpecError: The name has another form, there is no such module or file, the module has no
            source, or the source defines no such function.
    """
    module, _, function = name.rpartition(":")
    if not module or not function.isidentifier():
        raise SpecError(
            f"{name!r} names no function; write my_pkg.mod:function or PATH/FILE.py:function"
        )
    if recorded_file is not None and Path(recorded_file).is_file():
        file = Path(recorded_file)
    elif module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        if not file.is_file():
            raise SpecError(f"{name}: there is no file {file}")
    else:
        file = _module_file(module, name)
    if function not in _names_in(file):
        raise SpecError(f"{name}: {file} defines no {function!r}")
    short = f"{file.name}:{function}" if module.endswith(".py") else name
    return UserCode(name=short, file=str(file), digest=_sources_digest(file))


def load(code: UserCode) -> Callable[..., Any]:
    """Import the module of `code` and return its function.

    Raises:
        SpecError: The module raised while it was imported, is another file than the one that was
            digested, or what it names is not callable.
    """
    module, _, function = code.name.rpartition(":")
    file = Path(code.file)
    try:
        loaded = _import_file(file) if module.endswith(".py") else _import_module(file, module)
    except Exception as error:  # whatever the user's module raises
        raise SpecError(
            f"{code.name}: importing {file} raised {type(error).__name__}: {error}"
        ) from error
    _require_file(loaded, code)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise SpecError(f"{code.name}: {function!r} in {file} is {found!r}, not a function")
    result: Callable[..., Any] = found
    return result


def import_root(file: Path, module: str) -> Path:
    """Return the folder that must be on `sys.path` for `module` to be `file`."""
    depth = module.count(".") + (file.name == "__init__.py")
    return file.parents[depth]


def _module_file(module: str, name: str) -> Path:
    """Return the source of a dotted module: of the installed one, else below the current folder."""
    _make_importable(Path.cwd())
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SpecError(f"{name}: module {module!r} cannot be found: {error}") from error
    if found is None:
        raise SpecError(
            f"{name}: there is no module {module!r}, neither installed nor in {Path.cwd()}; "
            "install it, run from its folder, or name the file as PATH/FILE.py:function"
        )
    if found.origin is None or not found.origin.endswith(".py"):
        raise SpecError(f"{name}: module {module!r} has no Python source ({found.origin})")
    return Path(found.origin).resolve()


def _make_importable(folder: Path) -> None:
    # At the end: a folder of the user's must not shadow an installed package.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_module(file: Path, module: str) -> Any:
    """Import a dotted module out of the folder in which `file` was found.

    Another copy of its package may be earlier on `sys.path`: which one that is depends on how this
    process was started and from where, so the topmost package is taken from that folder by itself.
    """
    root, top = import_root(file, module), module.partition(".")[0]
    _make_importable(root)  # for a module beside it
    found = importlib.machinery.PathFinder.find_spec(top, [str(root)])
    if top not in sys.modules and found is not None and found.loader is not None:
        package = importlib.util.module_from_spec(found)
        sys.modules[top] = package
        try:
            found.loader.exec_module(package)
        except BaseException:
            sys.modules.pop(top, None)  # as an import statement does
            raise
    return importlib.import_module(module)


def _require_file(loaded: Any, code: UserCode) -> None:
    """Require that a module is the file that was digested, and no other copy of its name."""
    origin = getattr(loaded, "__file__", None)
    if origin is None or Path(origin).resolve() != Path(code.file).resolve():
        raise SpecError(
            f"{code.name}: the sources at {code.file} were found and digested, but Python has this "
            f"module from {origin}; keep one of the two, or name the file as PATH/FILE.py:function"
        )


def _import_file(file: Path) -> Any:
    name = f"lockstep_user_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    _make_importable(file.parent)  # for a module beside it
    sys.modules[name] = module  # dataclasses and pydantic look their module up
    specification.loader.exec_module(module)
    return module


def _names_in(file: Path) -> set[str]:
    """Return the names that a module binds anywhere, without running it."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"{file} is not valid Python: {error}") from error
    names: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
    return names


def _sources_digest(file: Path) -> str:
    root, files = file.parent, [file]
    if (root / "__init__.py").is_file():
        while (root.parent / "__init__.py").is_file():
            root = root.parent
        files, root = list(root.rglob("*.py")), root.parent
    hasher = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.hexdigest()
