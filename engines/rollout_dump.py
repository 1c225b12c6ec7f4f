"""Dumped rollouts: a file a step with all that its updates need, so that they can be run alone.

Invariant: what is read back has the bits of what was written (floats by `float.hex()`), so that a
step that is trained from its dump, at the weights of the step before, leaves the digests that it
left in its run. A dump names the trajectory that it was drawn in.

    write_dump(leg_folder, drawn, trajectory=trajectory_fingerprint(spec))
    for dump in read_dumps("runs/x/a/rollouts"):
        dump.drawn.samples
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.contracts import Prompt, Sample
from engines.loop import DrawnStep
from engines.provenance.fence import write_durably
from engines.provenance.side_files import decode_value, encode_line, encode_value
from model_specs.errors import ArtifactError

DUMP_SCHEMA_VERSION = 1
DUMP_FOLDER = "rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDump:
    """One step as it was drawn."""

    drawn: DrawnStep
    trajectory: str
    """Trajectory fingerprint of the run that drew it."""
    path: Path


def dump_path(leg_folder: str | Path, step: int) -> Path:
    """Return the file of a step's rollout."""
    return Path(leg_folder) / DUMP_FOLDER / f"step-{step:06d}.json"


def write_dump(leg_folder: str | Path, drawn: DrawnStep, *, trajectory: str) -> Path:
    """Write a step's rollout durably and return its file."""
    samples = [
        asdict(sample) | {"logprobs": [encode_value(value) for value in sample.logprobs]}
        for sample in drawn.samples
    ]
    content = {
        "schema_version": DUMP_SCHEMA_VERSION,
        "trajectory": trajectory,
        "step": drawn.step,
        "prompts": [asdict(prompt) for prompt in drawn.prompts],
        "samples": samples,
        "rewards": [encode_value(value) for value in drawn.rewards],
        "advantages": [encode_value(value) for value in drawn.advantages],
        "groups_with_variance": drawn.groups_with_variance,
    }
    path = dump_path(leg_folder, drawn.step)
    write_durably(path, encode_line(content))
    return path


def read_dumps(place: str | Path) -> tuple[RolloutDump, ...]:
    """Return the dumps at `place` by step: one file, a folder of them, or the folder of a leg.

    Raises:
        ArtifactError: There is none, one is damaged or of another schema version, or a step between
            the first and the last is missing.
    """
    root = Path(place)
    if (root / DUMP_FOLDER).is_dir():
        root = root / DUMP_FOLDER
    files = [root] if root.is_file() else sorted(root.glob("step-*.json"))
    if not files:
        raise ArtifactError(
            f"{place} is no dumped rollout and holds none; make some by `--rollout-only` or by "
            "`--set plan.dump_rollouts=true`"
        )
    dumps = tuple(sorted((_read(file) for file in files), key=lambda dump: dump.drawn.step))
    steps = [dump.drawn.step for dump in dumps]
    missing = sorted(set(range(steps[0], steps[-1] + 1)) - set(steps))
    if missing:
        raise ArtifactError(f"{place} has steps {steps[0]} to {steps[-1]} without {missing}")
    return dumps


def _read(path: Path) -> RolloutDump:
    try:
        content = json.loads(path.read_bytes())
        version = content["schema_version"]
        if version != DUMP_SCHEMA_VERSION:
            raise ArtifactError(
                f"{path} has dump schema version {version!r}; this version of Lockstep reads "
                f"{DUMP_SCHEMA_VERSION}"
            )
        return RolloutDump(drawn=_drawn(content), trajectory=content["trajectory"], path=path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged or no dumped rollout: {error!r}") from error


def _drawn(content: Mapping[str, Any]) -> DrawnStep:
    drawn = DrawnStep(
        step=content["step"],
        prompts=tuple(
            Prompt(**row | {"token_ids": tuple(row["token_ids"])}) for row in content["prompts"]
        ),
        samples=tuple(_sample(row) for row in content["samples"]),
        rewards=tuple(decode_value(value) for value in content["rewards"]),
        advantages=tuple(decode_value(value) for value in content["advantages"]),
        groups_with_variance=content["groups_with_variance"],
    )
    if not len(drawn.samples) == len(drawn.rewards) >= len(drawn.advantages):
        raise ValueError(
            f"{len(drawn.samples)} samples, {len(drawn.rewards)} rewards and "
            f"{len(drawn.advantages)} advantages"
        )
    return drawn


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        **{
            **row,
            "prompt_token_ids": tuple(row["prompt_token_ids"]),
            "token_ids": tuple(row["token_ids"]),
            "logprobs": tuple(decode_value(value) for value in row["logprobs"]),
            "forbidden_ids": tuple(row.get("forbidden_ids", ())),
        }
    )
