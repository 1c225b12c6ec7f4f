"""What the names of loaded modules stand for: code by its file, line and bytes, constants by value.

In a test it is compared with what a fresh process finds, which imports the same modules and nothing
of ours: `python tests/engines/loaded_code.py` reads module names, as JSON, and writes the answer.

    changed = differing(loaded("megatron"), fresh(["megatron.core.models.gpt", ...]))
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

Loaded = dict[str, list[str]]
"""Dotted name -> what it stands for: a constant, or its code and that of all that it wraps."""

_CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*")
"""Such as HAVE_TE. With an underscore in front, Megatron's are states that change while it runs."""
_PLAIN = (bool, int, float, str, type(None))
_CACHED = type(functools.cache(repr))


def loaded(package: str) -> Loaded:
    """What this process has under the names of a package's modules and classes."""
    return describe_modules(
        module
        for name, module in sorted(sys.modules.items())
        if name.split(".")[0] == package and isinstance(module, ModuleType)
    )


def describe_modules(modules: Iterable[ModuleType]) -> Loaded:
    found: Loaded = {}
    for module in modules:
        for attribute, value in list(vars(module).items()):
            name = f"{module.__name__}.{attribute}"
            if _CONSTANT.fullmatch(attribute) and type(value) in _PLAIN:
                found[name] = [repr(value)]
            elif code := list(codes(value)):
                found[name] = code
            elif issubclass(type(value), type) and value.__module__ == module.__name__:
                for part, member in vars(value).items():
                    if code := list(codes(member)):
                        found[f"{name}.{part}"] = code
    return found


def codes(value: Any) -> Iterator[str]:
    """Each code that a function, method or property runs or wraps, the outermost first.

    By type, since an object that is asked for attributes may do anything, as `torch.ops` does.
    """
    kind = type(value)
    if kind is property:
        yield from codes(value.fget)
        yield from codes(value.fset)
    elif kind is functools.partial:
        yield from codes(value.func)
    elif kind in (MethodType, staticmethod, classmethod):
        yield from codes(value.__func__)
    elif kind in (FunctionType, _CACHED):
        if kind is FunctionType:
            code = value.__code__
            digest = hashlib.sha256(code.co_code).hexdigest()[:16]
            yield f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {digest}"
        yield from codes(vars(value).get("__wrapped__"))


def fresh(modules: Iterable[str]) -> Loaded:
    """What a process finds that imports these modules, in this order, and nothing of ours."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps([*modules]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: Loaded = json.loads(ended.stdout.splitlines()[-1])
    return found


def differing(here: Loaded, there: Loaded) -> list[str]:
    """Names that stand for something else here than there, or for nothing on one side."""
    return sorted(name for name in here.keys() | there if here.get(name) != there.get(name))


if __name__ == "__main__":
    imported = [importlib.import_module(name) for name in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(describe_modules(imported)))
