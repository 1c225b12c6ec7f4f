"""The model families and the recipes that are known, by name; nothing registers itself.

Usage::

    spec = load_recipe("tiny_cpu")                       # shipped
    spec = load_recipe("my_recipe.py:recipe")            # own, or "my_pkg.mod:recipe"
    model = model_from("/models/my-qwen2")               # the facts that its config.json states
    check_config(spec.model, json.loads(path.read_text()), where=str(path))
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_specs.errors import SpecError
from model_specs.families import llama, qwen2, qwen3, qwen3_moe
from model_specs.families.decoder import Difference, describe
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec
from model_specs.sources import read_config
from model_specs.user_code import load, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family's config.json is read and compared."""

    model_type: str
    architecture: str
    """Name of the Hugging Face model class."""
    from_config: Callable[[Mapping[str, Any], str], ModelSpec]
    differences: Callable[[ModelSpec, Mapping[str, Any]], list[Difference]]


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        model_type=qwen2.MODEL_TYPE,
        architecture=qwen2.ARCHITECTURE,
        from_config=qwen2.from_config,
        differences=qwen2.expected_config_differences,
    ),
    "llama": Family(
        model_type=llama.MODEL_TYPE,
        architecture=llama.ARCHITECTURE,
        from_config=llama.from_config,
        differences=llama.expected_config_differences,
    ),
    "qwen3": Family(
        model_type=qwen3.MODEL_TYPE,
        architecture=qwen3.ARCHITECTURE,
        from_config=qwen3.from_config,
        differences=qwen3.expected_config_differences,
    ),
    "qwen3_moe": Family(
        model_type=qwen3_moe.MODEL_TYPE,
        architecture=qwen3_moe.ARCHITECTURE,
        from_config=qwen3_moe.from_config,
        differences=qwen3_moe.expected_config_differences,
    ),
}

RECIPES: dict[str, str] = {
    "tiny_cpu": "model_specs.recipes.tiny_cpu:recipe",
    "gsm8k_smollm2_135m": "model_specs.recipes.gsm8k_smollm2_135m:recipe",
    "gsm8k_qwen2_5_0_5b": "model_specs.recipes.gsm8k_qwen2_5_0_5b:recipe",
}
"""Recipe name -> `module:function` that returns its RunSpec."""


def load_recipe(name: str) -> RunSpec:
    """Return the spec of a recipe: shipped, `my_pkg.mod:function` or `FILE.py:function`.

    An own recipe is a function without parameters that returns a `RunSpec`; the spec is labelled
    with its name and the digest of its sources.

    Raises:
        SpecError: For an unknown name, listing the known ones, or an own recipe that cannot be
            imported, raises, or returns something else.
    """
    if name in RECIPES:
        module_name, _, function = RECIPES[name].partition(":")
        make: Callable[[], RunSpec] = getattr(importlib.import_module(module_name), function)
        return make()
    if ":" not in name:
        raise SpecError(
            f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}; own recipes "
            "are named FILE.py:function or my_pkg.mod:function"
        )
    code = locate(name)
    function_of_user = load(code)
    try:
        spec = function_of_user()
    except Exception as error:  # whatever the user's function raises
        raise SpecError(
            f"recipe {code.name} ({code.file}) raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, RunSpec):
        raise SpecError(
            f"recipe {code.name} ({code.file}) returned a {type(spec).__name__}, not a RunSpec"
        )
    return spec.model_copy(update={"recipe": code.name, "recipe_digest": code.digest})


def family_of(config: Mapping[str, Any], *, where: str = "config.json") -> Family:
    """Return the family that `config["model_type"]` names.

    Raises:
        SpecError: For an unknown or missing model type, listing the known ones.
    """
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    known = ", ".join(sorted(family.model_type for family in FAMILIES.values()))
    raise SpecError(f"{where}: model_type {model_type!r} is not supported; known types: {known}")


def spec_from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """Return the `ModelSpec` that the parsed config.json of folder `path` describes."""
    return family_of(config, where=f"{path}/config.json").from_config(config, path)


def model_from(source: str) -> ModelSpec:
    """Return the `ModelSpec` of a folder or `hf://org/name@revision`, from its config.json.

    Raises:
        SpecError: The source is of no known form, or its model is not supported, with every reason.
        ArtifactError: There is no readable config.json, or the hub cannot be reached.
    """
    path, config = read_config(source)
    return spec_from_config(config, path)


def check_config(spec: ModelSpec, config: Mapping[str, Any], *, where: str = "config.json") -> None:
    """Require that `config` describes exactly the model of `spec`.

    Raises:
        SpecError: One error with every differing field and both values.
    """
    family = family_of(config, where=where)
    if family.model_type != FAMILIES[spec.family].model_type:
        raise SpecError(
            f"{where}: model_type is {family.model_type!r} but the spec's family is {spec.family!r}"
        )
    differences = family.differences(spec, config)
    if differences:
        raise SpecError(
            f"{where} is not the model of the spec ({len(differences)} differing): "
            f"{describe(differences, left='spec')}; correct the spec (`--set model.FIELD=VALUE`) "
            "or name another model folder"
        )
