"""The ledger of a leg: one line an update with one root a probe, in causal order, and a chain.

`ledger.jsonl` begins with a header; then come `commit` lines (the trainer's log-probs, committed
before the rollout's are known to it) and `update` lines. Digests by name lie in
`digests/step-000003-0.json`, values of the sample probes in `samples/step-000003.json` (of a later
update of the step in `step-000003-1.json`); both are durable before the line that needs them.

    ledger = LedgerWriter(folder, header=LedgerHeader(...), fence=fence)
    ledger.commit(3, "train_logprobs", root)
    line = ledger.append(record, values)
    verify_ledger(folder)

Invariants: updates are there once and in order; a root of `train_logprobs` is the committed one;
the chain is d_k = H(d_(k-1), probe, root) over the roots alone, so that runs of different identity
can be compared. A last line without its newline was torn by a crash and does not count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.contracts import PROBES, StepRecord
from engines.provenance.digest import (
    CHAIN_START,
    chain_digest,
    digest_floats,
    digest_tokens,
    root_digest,
)
from engines.provenance.evidence_time import evidence
from engines.provenance.fence import Fence, write_durably
from engines.provenance.side_files import (
    Values,
    digests_path,
    encode_line,
    encode_value,
    read_digests,
    read_values,
    side_files_after,
    values_path,
)
from model_specs.errors import ArtifactError, EngineError

logger = logging.getLogger(__name__)

LEDGER_SCHEMA_VERSION = 1
LEDGER_FILE = "ledger.jsonl"
TOKEN_PROBES = ("prompts", "tokens")
"""Probes whose values are token ids; the values of all others are float32."""
BLIND_PROBE = "train_logprobs"
"""The probe whose root must have been committed before its update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHeader:
    """What a ledger belongs to."""

    schema_version: int = LEDGER_SCHEMA_VERSION
    trajectory: str
    """Trajectory fingerprint."""
    plan: str
    """Plan fingerprint."""
    run_id: str
    leg: str
    start_step: int = 0
    """Step of the first line, whose update is -1: the state that the leg begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One update."""

    step: int
    update: int
    roots: Mapping[str, str]
    """Probe -> root, in causal order; only the probes that this update has."""
    counts: Mapping[str, int]
    """Probe -> number of names under its root."""
    chain: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    violations: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """(step, update)."""
        return self.step, self.update


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment:
    """A root that was written down before its values were revealed."""

    step: int
    probe: str
    root: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A ledger as it was read; nothing in it has been verified."""

    header: LedgerHeader
    lines: tuple[LedgerLine, ...]
    commitments: tuple[Commitment, ...]
    notes: tuple[str, ...] = ()
    """What was left out on reading, such as a torn last line."""

    @property
    def chain(self) -> str:
        """The chain digest at the end."""
        return self.lines[-1].chain if self.lines else CHAIN_START

    @property
    def last_step(self) -> int:
        """Newest step with an update; -1 for an empty ledger."""
        return self.lines[-1].step if self.lines else -1


def roots_of(digests: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return probe -> root in causal order.

    Raises:
        EngineError: a probe that the contracts do not know.
    """
    unknown = sorted(digests.keys() - set(PROBES))
    if unknown:
        raise EngineError(f"ledger: unknown probe {unknown[0]!r}; one of {', '.join(PROBES)}")
    return {probe: root_digest(digests[probe]) for probe in PROBES if probe in digests}


def extend_chain(chain: str, roots: Mapping[str, str]) -> str:
    """Return the chain after an update with these roots."""
    for probe in PROBES:
        if probe in roots:
            chain = chain_digest(chain, probe, roots[probe])
    return chain


def read_ledger(folder: str | Path) -> Ledger:
    """Read a leg's ledger.

    Raises:
        ArtifactError: no ledger, a schema version that this code does not know, or a damaged line.
    """
    path = Path(folder) / LEDGER_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} has no {LEDGER_FILE}; it is not the folder of a leg"
        ) from None
    notes = []
    whole, newline, torn = content.rpartition(b"\n")
    if torn:
        notes.append(f"{path}: the last line was torn ({len(torn)} bytes) and is left out")
    if not newline:
        raise ArtifactError(f"{path} has no header; remove it and start the leg again")
    rows = [_parse(path, number, text) for number, text in enumerate(whole.split(b"\n"), start=1)]
    header = _header(path, rows[0])
    lines: list[LedgerLine] = []
    commitments: list[Commitment] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            kind = row.pop("kind")
            if kind == "commit":
                commitments.append(Commitment(**row))
            elif kind == "update":
                lines.append(_line(row))
            else:
                raise ArtifactError(f"{path} line {number}: unknown kind {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} line {number} is damaged: {error!r}") from error
    return Ledger(
        header=header, lines=tuple(lines), commitments=tuple(commitments), notes=tuple(notes)
    )


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{path} line {number} is damaged: {error}") from error
    if not isinstance(row, dict):
        raise ArtifactError(f"{path} line {number} is damaged: not an object")
    return row


def _header(path: Path, row: dict[str, Any]) -> LedgerHeader:
    version = row.get("schema_version")
    if version != LEDGER_SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has ledger schema version {version!r}; this version of Lockstep reads "
            f"{LEDGER_SCHEMA_VERSION}: read it with the version that wrote it"
        )
    row.pop("kind", None)
    try:
        return LedgerHeader(**row)
    except TypeError as error:
        raise ArtifactError(f"{path} line 1 is not a header: {error}") from error


def _line(row: dict[str, Any]) -> LedgerLine:
    return LedgerLine(
        step=int(row["step"]),
        update=int(row["update"]),
        roots=row["roots"],
        counts=row["counts"],
        chain=row["chain"],
        metrics={name: float.fromhex(value) for name, value in row["metrics"].items()},
        violations=tuple(row["violations"]),
    )


class LedgerWriter:
    """Appends to a leg's ledger; opens an existing one where it ended."""

    def __init__(
        self, folder: str | Path, *, header: LedgerHeader, fence: Fence | None = None
    ) -> None:
        """Open or start the ledger.

        Raises:
            ArtifactError: the folder holds the ledger of another trajectory, run or leg.
        """
        self.folder = Path(folder)
        self.path = self.folder / LEDGER_FILE
        self.notes: tuple[str, ...] = ()
        self._fence = fence
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            with self._held():
                write_durably(self.path, encode_line({"kind": "header", **asdict(header)}))
        self._ledger = read_ledger(self.folder)
        self._require_same(header)
        if self._ledger.notes:
            self.notes = self._ledger.notes
            logger.warning("%s", "; ".join(self.notes))
            content = self.path.read_bytes()
            with self._held():
                write_durably(self.path, content[: content.rfind(b"\n") + 1])
        self._lines = list(self._ledger.lines)
        self._commitments = list(self._ledger.commitments)

    @property
    def chain(self) -> str:
        """The chain digest so far."""
        return self._lines[-1].chain if self._lines else CHAIN_START

    @property
    def last_step(self) -> int:
        """Newest step with an update; -1 for an empty ledger."""
        return self._lines[-1].step if self._lines else -1

    @property
    def lines(self) -> tuple[LedgerLine, ...]:
        """The updates so far."""
        return tuple(self._lines)

    @property
    def num_lines(self) -> int:
        """Number of updates so far, line 0 included."""
        return len(self._lines)

    def last_digests(self, probe: str) -> dict[str, str]:
        """Return name -> digest of a probe at its newest update that has it.

        Raises:
            ArtifactError: no update has this probe.
        """
        for line in reversed(self._lines):
            if probe in line.roots:
                return read_digests(self.folder, line.step, line.update)[probe]
        raise ArtifactError(f"{self.path}: no update has the probe {probe}")

    @evidence
    def commit(self, step: int, probe: str, root: str) -> None:
        """Write down a root before its values are revealed.

        Raises:
            EngineError: not the next step, or committed already with another root.
        """
        if step != self.last_step + 1:
            raise EngineError(
                f"{self.path}: a commitment for step {step} after step {self.last_step}; the next "
                f"step is {self.last_step + 1}"
            )
        known = _committed(self._commitments, step, probe)
        if known is not None:
            raise EngineError(
                f"{self.path}: step {step} {probe} is committed already with {known}, now {root}; "
                "truncate the ledger to the checkpoint before running the step again"
            )
        commitment = Commitment(step=step, probe=probe, root=root)
        self._append_line({"kind": "commit", **asdict(commitment)})
        self._commitments.append(commitment)

    @evidence
    def append(self, record: StepRecord, values: Values | None = None) -> LedgerLine:
        """Write one update: side files first, then its line.

        Raises:
            EngineError: out of order, an unknown probe, or not the committed log-probs.
            StaleAttemptError: a newer attempt has started.
        """
        previous = self._lines[-1].key if self._lines else None
        _require_next(str(self.path), previous, record, self._ledger.header.start_step)
        roots = roots_of(record.digests)
        _require_committed(str(self.path), record.step, record.update, roots, self._commitments)
        line = LedgerLine(
            step=record.step,
            update=record.update,
            roots=roots,
            counts={probe: len(record.digests[probe]) for probe in roots},
            chain=extend_chain(self.chain, roots),
            metrics=dict(record.metrics),
            violations=record.violations,
        )
        with self._held():
            digests = {probe: dict(record.digests[probe]) for probe in roots}
            write_durably(
                digests_path(self.folder, record.step, record.update), encode_line(digests)
            )
            if values:
                encoded = {
                    probe: {
                        name: [encode_value(value) for value in row] for name, row in rows.items()
                    }
                    for probe, rows in values.items()
                }
                write_durably(
                    values_path(self.folder, record.step, record.update), encode_line(encoded)
                )
        metrics = {name: float(value).hex() for name, value in line.metrics.items()}
        self._append_line({"kind": "update", **asdict(line), "metrics": metrics})
        self._lines.append(line)
        return line

    def truncate_after(self, step: int) -> None:
        """Drop everything after a step, for a resume from its checkpoint.

        Raises:
            ArtifactError: the ledger does not reach the step.
        """
        if step > self.last_step:
            raise ArtifactError(
                f"{self.path} ends at step {self.last_step}, before the checkpoint's step {step}; "
                "resume from an older checkpoint"
            )
        header, *rows = self.path.read_bytes().splitlines(keepends=True)
        kept = [row for row in rows if json.loads(row)["step"] <= step]
        with self._held():
            write_durably(self.path, b"".join([header, *kept]))
            for path in side_files_after(self.folder, step):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._lines = [line for line in self._lines if line.step <= step]
        self._commitments = [known for known in self._commitments if known.step <= step]

    def _require_same(self, header: LedgerHeader) -> None:
        # The plan may differ: a longer run goes on with the ledger of a shorter one.
        for name in ("trajectory", "run_id", "leg"):
            found, wanted = getattr(self._ledger.header, name), getattr(header, name)
            if found != wanted:
                raise ArtifactError(
                    f"{self.path} belongs to {name} {found!r}, not {wanted!r}; use another folder"
                )

    def _append_line(self, row: Mapping[str, Any]) -> None:
        with self._held(), open(self.path, "ab") as file:
            file.write(encode_line(row))
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if self._fence is None:
            yield
            return
        with self._fence.hold():
            yield


def verify_ledger(folder: str | Path) -> Ledger:
    """Recompute every root and the chain from the side files, and sample digests from values.

    Raises:
        ArtifactError: naming the line and both values of the first thing that does not hold.
    """
    ledger = read_ledger(folder)
    path = str(Path(folder) / LEDGER_FILE)
    chain, previous = CHAIN_START, None
    for line in ledger.lines:
        where = f"{path} step {line.step} update {line.update}"
        digests = read_digests(folder, line.step, line.update)
        try:
            _require_next(path, previous, line, ledger.header.start_step)
            roots = roots_of(digests)
            _require_committed(path, line.step, line.update, roots, ledger.commitments)
        except EngineError as error:
            raise ArtifactError(f"{where}: {error}") from error
        for probe in PROBES:
            if roots.get(probe) != line.roots.get(probe):
                raise ArtifactError(
                    f"{where}: root of {probe} is recorded as {line.roots.get(probe)}, its side "
                    f"file gives {roots.get(probe)}"
                )
        counts = {probe: len(digests[probe]) for probe in roots}
        if dict(line.counts) != counts:
            raise ArtifactError(
                f"{where}: the names under each root are recorded as {dict(line.counts)}, its side "
                f"file has {counts}"
            )
        _verify_values(where, digests, read_values(folder, line.step, line.update))
        chain = extend_chain(chain, roots)
        if chain != line.chain:
            raise ArtifactError(f"{where}: the chain is recorded as {line.chain}, not {chain}")
        previous = line.key
    return ledger


def _verify_values(where: str, digests: Mapping[str, Mapping[str, str]], values: Values) -> None:
    for probe, rows in values.items():
        for name, row in rows.items():
            digest = digest_tokens if probe in TOKEN_PROBES else digest_floats
            found = digest(name, row)
            recorded = digests.get(probe, {}).get(name)
            if found != recorded:
                raise ArtifactError(
                    f"{where}: {probe} of {name} is recorded as {recorded}, its values give {found}"
                )


def _require_next(
    path: str, previous: tuple[int, int] | None, record: StepRecord | LedgerLine, start_step: int
) -> None:
    key = (record.step, record.update)
    if previous is None:
        allowed = [(start_step, -1)]
    elif previous[1] == -1:
        allowed = [(start_step + 1, 0)]
    else:
        allowed = [(previous[0], previous[1] + 1), (previous[0] + 1, 0)]
    if key not in allowed:
        raise EngineError(
            f"{path}: (step, update) {key} after {previous}; allowed is "
            f"{' or '.join(str(next_key) for next_key in allowed)}"
        )


def _require_committed(
    path: str, step: int, update: int, roots: Mapping[str, str], commitments: Sequence[Commitment]
) -> None:
    committed = _committed(commitments, step, BLIND_PROBE)
    found = roots.get(BLIND_PROBE)
    if found is None and (committed is None or update != 0):
        return
    if found != committed:
        raise EngineError(
            f"{path}: {BLIND_PROBE} of step {step} was committed as {committed} before the "
            f"rollout's log-probs were known, but the update has {found}"
        )


def _committed(commitments: Sequence[Commitment], step: int, probe: str) -> str | None:
    # The newest ones are last.
    for known in reversed(commitments):
        if known.step == step and known.probe == probe:
            return known.root
    return None
