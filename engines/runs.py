"""Run folders: a new one with a readable name, an existing one by name or path, its checkpoints."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engines.checkpoint.dcp import META_FILE, CheckpointMeta, checkpoint_name, read_meta
from engines.contracts import ArtifactRef
from engines.provenance.fence import Fence, RunFolder, write_durably
from engines.provenance.ledger import LEDGER_FILE, Ledger, read_ledger
from model_specs.errors import ArtifactError, CheckpointError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.run_spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder under an attempt."""

    folder: Path
    fence: Fence

    @property
    def run_id(self) -> str:
        """Name of the folder."""
        return self.folder.name


def new_run(spec: RunSpec, runs_dir: Path, *, run_id: str | None = None) -> Run:
    """Make a run folder named by time, recipe and fingerprint, and take its first attempt."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    recipe = re.sub(r"[^\w.-]+", "-", spec.recipe)  # an own recipe is named FILE.py:function
    name = run_id or f"{stamp}-{recipe}-{trajectory_fingerprint(spec)[:6]}"
    folder = RunFolder.create(runs_dir.resolve() / name, run_id=name)
    write_spec(folder.path, spec)
    return Run(folder=folder.path, fence=folder.new_attempt())


def reopen(folder: Path) -> Run:
    """Take a new attempt of an existing run; every older attempt may not write any more."""
    return Run(folder=folder, fence=RunFolder.open(folder).new_attempt())


def open_run(name: str, runs_dir: Path) -> Path:
    """The folder of an existing run, named by path, full id or an unambiguous part of it."""
    direct = Path(name)
    if (direct / "run.json").is_file():
        return direct.resolve()
    found = sorted(path.parent for path in runs_dir.glob(f"*{name}*/run.json"))
    exact = [path for path in found if path.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0].resolve()
    known = sorted(path.parent.name for path in runs_dir.glob("*/run.json"))
    raise SpecError(
        f"run {name!r}: {len(found)} runs match in {runs_dir.resolve()}; "
        f"known runs: {', '.join(known[-8:]) or 'none'}"
    )


def open_leg(name: str, runs_dir: Path) -> Path:
    """The folder of a leg, named as RUN/LEG or as RUN for a run with one leg."""
    direct = Path(name)
    if (direct / "ledger.jsonl").is_file():
        return direct.resolve()
    run, slash, leg = name.rpartition("/")
    if slash and not (direct / "run.json").is_file():
        folder = open_run(run, runs_dir)
        if leg in legs(folder):
            return folder / leg
        raise SpecError(
            f"run {folder.name} has no leg {leg!r}; its legs: {', '.join(legs(folder))}"
        )
    folder = open_run(name, runs_dir)
    present = legs(folder)
    if not present:
        raise SpecError(f"run {folder.name} has no ledger yet, so there is nothing to compare")
    return folder / present[0]


def read_spec(folder: Path) -> RunSpec:
    """The resolved spec of a run, to run it again; `read_json` is for one that is only looked at.

    Raises:
        ArtifactError: There is none, or it is not one of this version.
    """
    path = folder / "spec.json"
    values = read_json(path)
    try:
        return RunSpec.model_validate_json(json.dumps(values))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, row['loc'])) or 'spec'}: {row['msg']}" for row in error.errors()
        )
        raise ArtifactError(
            f"{path} is not a spec of this version: {wrong}. Run it with the version that wrote "
            "it; to compare what it left, `lockstep diff` needs no valid spec"
        ) from error


def write_spec(folder: Path, spec: RunSpec) -> None:
    """Record the spec of a run."""
    write_json(folder / "spec.json", json.loads(spec.model_dump_json()))


def legs(folder: Path) -> tuple[str, ...]:
    """Names of the legs that have a ledger, sorted."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/ledger.jsonl")))


def checkpoints(leg_folder: Path) -> dict[int, ArtifactRef]:
    """Step -> committed checkpoint of a leg, by step; one whose meta is torn is left out."""
    return _references(_committed(leg_folder))


def _references(committed: Sequence[tuple[Path, CheckpointMeta]]) -> dict[int, ArtifactRef]:
    return {
        meta.step: ArtifactRef(uri=str(folder), kind="checkpoint", digest=meta.state_digest)
        for folder, meta in committed
    }


def _committed(leg_folder: Path) -> list[tuple[Path, CheckpointMeta]]:
    """Folder and meta of each committed checkpoint, by step."""
    found = []
    for meta_path in leg_folder.glob(f"checkpoints/step-*/{META_FILE}"):
        folder = meta_path.parent
        if folder.suffix:  # being written, or replaced by another
            continue
        try:
            meta = read_meta(folder)
        except CheckpointError as error:
            logger.warning("left out: %s", error)
            continue
        if folder.name != checkpoint_name(meta.step):
            logger.warning("left out: %s holds step %d; it is a copy", folder, meta.step)
            continue
        found.append((folder, meta))
    return sorted(found, key=lambda each: each[1].step)


def _told_apart(
    leg_folder: Path,
) -> tuple[dict[int, ArtifactRef], dict[int, str], Ledger | None]:
    """Return the committed checkpoints by step, what is wrong with some, and the ledger if any.

    Wrong are those of other updates than the ledger's. An attempt that was taken back may have left
    them: the ledger went on from an earlier step, and its updates had other bits. The checkpoint
    that a fork began with has its parent's chain.
    """
    committed = _committed(leg_folder)
    if not (leg_folder / LEDGER_FILE).is_file():
        return _references(committed), {}, None
    ledger = read_ledger(leg_folder)
    first = ledger.header.start_step + 1
    chains = {line.step: line.chain for line in ledger.lines if line.step >= first}
    foreign = {
        meta.step: f"its chain is {meta.chain_digest}, the ledger's is {chains[meta.step]}"
        for _, meta in committed
        if chains.get(meta.step, meta.chain_digest) != meta.chain_digest
    }
    return _references(committed), foreign, ledger


def checkpoint_at(leg_folder: Path, step: int | None) -> tuple[int, ArtifactRef]:
    """The committed checkpoint of a step, or the newest where `step` is None.

    The newest is one whose step the ledger has: an attempt that was taken back to an earlier step
    may have left later ones behind.

    Raises:
        CheckpointError: There is none, listing those that there are, or it belongs to other updates
            than those of the ledger.
    """
    found, foreign, ledger = _told_apart(leg_folder)
    if not found:
        raise CheckpointError(
            f"{leg_folder} has no committed checkpoint, so nothing can go on from it; run it again"
        )
    if step is None:
        last = max(found)
        if ledger is not None:
            # A ledger that has only its header has not got beyond where it began.
            last = max(ledger.last_step, ledger.header.start_step)
        known = [at for at in found if at <= last and at not in foreign]
        step = max(known, default=last)
    usable = sorted(found.keys() - foreign.keys())
    if step in foreign:
        raise CheckpointError(
            f"{leg_folder}: the checkpoint of step {step} is of an attempt that was taken back: "
            f"{foreign[step]}; name one of {usable}"
        )
    if step not in found:
        raise CheckpointError(
            f"{leg_folder} has no committed checkpoint of step {step}; it has {usable}"
        )
    return step, found[step]


def checkpoint_before(leg_folder: Path, step: int) -> tuple[int, ArtifactRef | None]:
    """The newest committed checkpoint from which `step` can be run: its step, and where it is.

    None stands for the initial weights, of step 0.
    """
    found, foreign, _ = _told_apart(leg_folder)
    earlier = {at: each for at, each in found.items() if at < step and at not in foreign}
    newest = max(earlier, default=0)
    return newest, earlier.get(newest)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file durably, sorted and readable."""
    write_durably(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())
