r"""What a deployment is asked for: typed, so that a bad value is refused before a run exists.

Prefect's server checks a request against the JSON schema of these models when a run is asked for
(`prefect deployment run`), and names the field: a recipe that is not shipped, a field that the spec
does not have, a value outside of its range. What only the whole spec can say (whether fields fit
together) is refused at the start of the flow.

    prefect deployment run 'nightly/tiny-cpu' \
      --param 'request={"recipe": "tiny_cpu", "overrides": {"plan.num_steps": 4}}' --watch
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from engines.faults import FLIP_PROBES, parse_flip
from model_specs.base import Frozen
from model_specs.errors import SpecError
from model_specs.field_schema import overrides_schema
from model_specs.registry import RECIPES
from model_specs.variation import VARIED, Varied

ShippedRecipe = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(RECIPES)})]
"""Name of a shipped recipe."""

Overrides = Annotated[dict[str, Any], WithJsonSchema(overrides_schema())]
"""Dotted field of the spec -> value, as `--set` takes them."""

FlipProbe = Annotated[str, WithJsonSchema({"type": "string", "enum": list(FLIP_PROBES)})]
"""Probe whose live value can be flipped."""

OWN_RECIPE = r"^.+:[A-Za-z_]\w*$"

RunName = Annotated[str, Field(pattern=r"^[^@]+$")]
"""Name or folder of a run."""

RunAtStep = Annotated[str, Field(pattern=r"^[^@]+(@[0-9]+)?$")]
"""A run and one of its checkpoints, `RUN@STEP`; the newest of them as `RUN`."""

LockName = Annotated[str, Field(pattern=r"^([^@]+|.*lock\.json)$")]
"""Name or folder of a run, or a `lock.json`."""

Leg = Annotated[str, Field(pattern=r"^\w+$")]
"""Name of a leg of a run, such as `a`."""


class Changes(Frozen):
    """What is changed in a spec."""

    overrides: Overrides = Field(default_factory=dict)
    """Changes of spec fields, such as `{"plan.num_steps": 4}`."""

    @property
    def assignments(self) -> tuple[str, ...]:
        """The overrides as `key=value` texts."""
        return tuple(f"{name}={_text(value)}" for name, value in self.overrides.items())

    def described(self, label: str) -> str:
        """Return a label with the first few overrides, for the name of a flow run."""
        more = len(self.overrides) - 3
        return " ".join([label, *self.assignments[:3], *([f"and {more} more"] if more > 0 else [])])


class Request(Changes):
    """Which spec is run: a recipe, shipped or own, and what is changed in it."""

    SOURCES: ClassVar[tuple[str, ...]] = ("recipe", "recipe_path")
    """Fields of which exactly one is given."""
    NEEDS_SOURCE: ClassVar[bool] = True
    """False: none of them may be given, too."""

    recipe: ShippedRecipe | SkipJsonSchema[None] = None
    """Name of a shipped recipe."""
    recipe_path: Annotated[str, Field(pattern=OWN_RECIPE)] | SkipJsonSchema[None] = None
    """Own recipe: `PATH/FILE.py:function` or `my_pkg.mod:function`, as the worker finds it."""

    @model_validator(mode="after")
    def _one_source(self) -> Request:
        given = [name for name in self.SOURCES if getattr(self, name) is not None]
        if len(given) > 1 or (self.NEEDS_SOURCE and not given):
            raise ValueError(
                f"{'exactly' if self.NEEDS_SOURCE else 'at most'} one of "
                f"{', '.join(self.SOURCES)} is needed, not {' and '.join(given) or 'none'}"
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Say in the schema, too, how many of `SOURCES` are given."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        if cls.NEEDS_SOURCE:
            schema["oneOf"] = [{"required": [name]} for name in cls.SOURCES]
        else:
            schema["not"] = {"required": list(cls.SOURCES)}
        return schema

    @property
    def names_recipe(self) -> bool:
        """Whether a recipe is given."""
        return self.recipe is not None or self.recipe_path is not None

    @property
    def source(self) -> str:
        """Name of the recipe, as `load_recipe` takes it."""
        name = self.recipe or self.recipe_path
        assert name is not None
        return name

    def describe(self) -> str:
        """Return what is run in a few words, for the name of a flow run."""
        return self.described(self.recipe or PurePath(str(self.recipe_path)).name)


class TrainRequest(Request):
    """One leg: of a recipe, the rest of a run that exists, or one that branches off from it."""

    SOURCES: ClassVar[tuple[str, ...]] = ("recipe", "recipe_path", "resume", "fork")

    resume: RunAtStep | SkipJsonSchema[None] = None
    """Go on with a run from its newest checkpoint (`RUN`) or an earlier one (`RUN@STEP`)."""

    fork: RunAtStep | SkipJsonSchema[None] = None
    """Begin a run of its own with a checkpoint of another (`RUN` or `RUN@STEP`)."""

    def describe(self) -> str:
        """Return what is run in a few words."""
        if self.resume or self.fork:
            return self.described(f"resume {self.resume}" if self.resume else f"fork {self.fork}")
        return super().describe()


class FlipRequest(Frozen):
    """One bit of one live value to be flipped, on purpose."""

    step: int = Field(ge=1)
    probe: FlipProbe
    tensor: str | SkipJsonSchema[None] = None
    """Tensor or sample; the first in sorted order when it is not given."""
    element: int = Field(default=0, ge=0)
    bit: int = Field(default=0, ge=0)
    """0 is the lowest bit of the element's storage."""

    def as_text(self) -> str:
        """Return the text that `--inject-flip` takes."""
        tensor = f",tensor={self.tensor}" if self.tensor else ""
        return f"step={self.step},probe={self.probe}{tensor},element={self.element},bit={self.bit}"


class TwinRequest(Request):
    """Two legs of one recipe; optionally with a fault that has to be found."""

    inject_flip: FlipRequest | SkipJsonSchema[None] = None
    """Flip one bit of a live value in leg b, for example `{"step": 3, "probe": "grads"}`."""

    def describe(self) -> str:
        """Return what is run in a few words, with the flip."""
        flip = f" flip {self.inject_flip.as_text()}" if self.inject_flip else ""
        return super().describe() + flip


class NightlyRequest(TwinRequest):
    """A night: legs a and b, b varied, half of a resumed, and the last green night."""

    vary: tuple[Varied, ...] = VARIED
    """What leg b is run under; all by default, and nothing where it is empty."""


class CompareRequest(Frozen):
    """Which legs are compared: by their names, or by the tags that they carry in MLflow."""

    runs: tuple[str, ...] = ()
    """Two or more of `RUN`, `RUN/LEG`, a folder, `mlflow:ID`; all are compared with the first."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tag -> value, such as `{"trajectory_fingerprint": "8cf650..."}`; all legs that carry them."""
    experiment: str | SkipJsonSchema[None] = None
    """MLflow experiment that is searched by `tags`; all when it is not given."""
    across: tuple[str, ...] = ()
    """What is expected to differ: fields such as `optimizer.lr`, or groups such as `layout`."""

    @model_validator(mode="after")
    def _one_way(self) -> CompareRequest:
        if bool(self.runs) == bool(self.tags):
            raise ValueError("exactly one of runs and tags is needed")
        if len(self.runs) == 1:
            raise ValueError(f"two or more runs are needed, not {self.runs[0]!r} alone")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Say in the schema, too, that exactly one of both is given."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        schema["oneOf"] = [{"required": [name]} for name in ("runs", "tags")]
        schema["properties"]["runs"]["minItems"] = 2
        schema["properties"]["tags"]["minProperties"] = 1
        return schema

    def describe(self) -> str:
        """Return what is compared in a few words."""
        if self.runs:
            more = len(self.runs) - 3
            return " ".join([*self.runs[:3], *([f"and {more} more"] if more > 0 else [])])
        return " ".join(f"{name}={value}" for name, value in self.tags.items())


class ResumeRequest(Changes):
    """The rest of a run; only its plan and execution may change."""

    run: RunAtStep
    leg: Leg = "a"
    """Leg to go on with."""

    def describe(self) -> str:
        """Return what goes on in a few words."""
        return self.described(self.run)


class ForkRequest(Changes):
    """A run of its own that begins with a checkpoint of another; all but the model may change."""

    run: RunAtStep
    leg: Leg = "a"
    """Leg of the parent."""

    def describe(self) -> str:
        """Return what is branched off in a few words."""
        return self.described(self.run)


class ExportRequest(Frozen):
    """A checkpoint that becomes a Hugging Face folder."""

    run: RunAtStep
    leg: Leg = "a"
    out: Annotated[str, Field(min_length=1)] | SkipJsonSchema[None] = None
    """New folder; `RUN/<leg>/exports/step-...` when it is not given."""

    def describe(self) -> str:
        """Return what is exported in a few words."""
        return self.run


class VerifyRequest(Frozen):
    """A checkpoint interval that is run again."""

    run: RunName
    segment: int = Field(ge=1)
    """Segment K is the steps from checkpoint K-1 to checkpoint K."""
    leg: Leg = "a"

    def describe(self) -> str:
        """Return what is verified in a few words."""
        return f"{self.run} segment {self.segment}"


class VerifyLockRequest(Frozen):
    """A locked pipeline whose stages are all run again."""

    lock: LockName
    """A run, or a `lock.json` with its `spec.json` beside it."""
    leg: Leg = "a"

    def describe(self) -> str:
        """Return what is verified in a few words."""
        return f"{self.lock} leg {self.leg}"


class GatesRequest(Frozen):
    """The newest checkpoint of a leg, at which the gates are run."""

    run: RunName
    leg: Leg = "a"

    def describe(self) -> str:
        """Return what is judged in a few words."""
        return f"{self.run} leg {self.leg}"


class TrainOnlyRequest(Request):
    """Training on dumped rollouts, without a rollout engine.

    Where no recipe is given, the spec is that of the leg that has the dump.
    """

    NEEDS_SOURCE: ClassVar[bool] = False

    dump: Annotated[str, Field(min_length=1)]
    """Dumped rollout of one step, a folder of them, or the folder of a leg that has some."""

    def describe(self) -> str:
        """Return what is trained in a few words, with the dump."""
        what = super().describe() if self.names_recipe else self.described("own spec")
        return f"{what} on {PurePath(self.dump).name}"


R = TypeVar("R", bound=Frozen)


def asked(kind: type[R], **values: Any) -> R:
    """Make a request of what the command line was given.

    Raises:
        SpecError: With the name of each field that cannot be used, its value and the reason.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        rows = []
        for row in error.errors():
            said = row["msg"].removeprefix("Value error, ")
            field = ".".join(map(str, row["loc"]))
            rows.append(f"{field}={row['input']!r}: {said}" if field else said)
        raise SpecError("; ".join(rows)) from error


def flip_request(text: str | None) -> FlipRequest | None:
    """Return the flip that an `--inject-flip` text means; None for None.

    Raises:
        SpecError: A key, a probe or a number that cannot be used.
    """
    if text is None:
        return None
    flip = parse_flip(text)
    return FlipRequest(
        step=flip.step, probe=flip.probe, tensor=flip.name, element=flip.element, bit=flip.bit
    )


def run_at_step(text: str) -> tuple[str, int | None]:
    """Return name and step of `RUN@STEP`; the step is None for the newest checkpoint.

    Raises:
        SpecError: What stands behind the `@` is no whole number.
    """
    name, at, step = text.partition("@")
    if at and not step.isdigit():
        raise SpecError(f"not RUN or RUN@STEP: {text!r}; STEP is a whole number")
    return name, int(step) if at else None


def request_source(name: str | None) -> dict[str, str]:
    """Return the field that names this recipe: own recipes have a colon in their name."""
    return {} if name is None else {"recipe_path" if ":" in name else "recipe": name}


def as_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` texts as a mapping; of two for one field the last counts.

    Raises:
        SpecError: A text is not of that form.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise SpecError(f"override {assignment!r} is not of the form key=value")
        overrides.pop(name.strip(), None)
        overrides[name.strip()] = value
    return overrides


def run_name() -> str:
    """Name the current flow run by its flow and what it was asked for."""
    from prefect.runtime import flow_run

    parameters: Mapping[str, Any] = flow_run.parameters
    return f"{flow_run.flow_name} {parameters['request'].describe()}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
