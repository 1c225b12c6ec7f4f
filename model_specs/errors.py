"""Every error a user can meet, as a small tree; each class carries the command's exit code.

The message of each says what happened, both values, where, and what to do. `ValueError`-like user
mistakes are `SpecError`; `assert` stays for the project's own invariants.
"""

from __future__ import annotations


class LockstepError(Exception):
    """Base of all errors that Lockstep raises on purpose."""

    exit_code = 1


class SpecError(LockstepError):
    """The user's spec, override or command cannot be used as it stands."""

    exit_code = 2


class ArtifactError(SpecError):
    """An input file or folder is missing, truncated, or not what its manifest says."""


class CheckpointError(SpecError):
    """A checkpoint is torn, foreign, or not the state that was asked for."""


class DivergedError(LockstepError):
    """Something that was computed twice came out differently.

    Attributes:
        probe: What was computed, by the name of its probe.
        name: First sample or tensor that differs.
    """

    exit_code = 10

    def __init__(self, message: str, *, probe: str = "", name: str = "") -> None:
        super().__init__(message)
        self.probe = probe
        self.name = name


class UnsupportedError(LockstepError):
    """A combination that the capability table refuses, by name."""

    exit_code = 14


class EngineError(LockstepError):
    """An engine process failed, was lost, or answered something impossible."""

    exit_code = 20


class StaleAttemptError(EngineError):
    """A newer attempt of the same run has started; this one must not write any more."""


class CancelledError(LockstepError):
    """The run was cancelled by its user."""

    exit_code = 130
