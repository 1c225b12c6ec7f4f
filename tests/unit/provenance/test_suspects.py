"""Suspects are ranked by how directly they act on arithmetic, whatever order they come in."""

from __future__ import annotations

import itertools

from engines.provenance.suspects import rank_suspects

CHANGES = (
    ("git.commit", "1" * 40, "2" * 40),
    ("execution.threads", 1, 2),
    ("trainer.variables.OMP_NUM_THREADS", "1", "2"),
    ("trainer.torch.mkldnn", True, False),
    ("trainer.cpu.capability", "AVX512", "AVX2"),
    ("trainer.versions.torch", "2.13.0", "2.13.1"),
    ("trainer.sources.engines/numerics/norm.py", "a" * 16, "b" * 16),
)
"""Least likely first."""


def test_op_code_comes_first_and_the_commit_last_in_whatever_order_they_are_found() -> None:
    for order in itertools.permutations(CHANGES, len(CHANGES)):
        kinds = [suspect.kind for suspect in rank_suspects(order)]
        assert kinds == [
            *("op code", "library", "instruction set", "switch", "variable"),
            *("execution", "commit"),
        ]


def test_what_changed_alike_in_several_engines_is_one_suspect_with_its_places() -> None:
    places = ("trainer", "rollout.rollout-0", "rollout.rollout-1")
    same = [(f"{place}.versions.torch", "2.13.0", "2.13.1") for place in places]
    (suspect,) = rank_suspects(same)
    assert suspect.places == places
    assert str(suspect) == (
        "library torch: 2.13.0 -> 2.13.1 (trainer, rollout.rollout-0, rollout.rollout-1)"
    )
    other = rank_suspects([same[0], ("rollout.rollout-0.versions.torch", "2.13.0", "2.12.0")])
    assert len(other) == 2


def test_the_file_of_an_op_is_named_and_the_digest_of_all_code_comes_after_it() -> None:
    first, second = rank_suspects(
        [
            ("trainer.code_digest", "c" * 64, "d" * 64),
            ("trainer.sources.engines/numerics/norm.py", "a" * 16, "b" * 16),
        ]
    )
    assert str(first) == "op code engines/numerics/norm.py: aaaaaaaaaaaa -> bbbbbbbbbbbb (trainer)"
    assert (second.kind, second.field) == ("code", "code_digest")


def test_what_was_varied_on_purpose_comes_after_all_that_was_not() -> None:
    threads = ("trainer.sources.engines/numerics/norm.py", "a" * 16, "b" * 16)
    suspects = rank_suspects([*CHANGES[:3], threads], declared=(r"sources\.",))
    assert [suspect.declared for suspect in suspects] == [False, False, False, True]
    assert str(suspects[-1]).endswith(", varied on purpose")


def test_an_engine_that_is_there_on_one_side_alone_is_one_suspect() -> None:
    facts = ("engine_index", "threads", "versions.torch", "variables.OMP_NUM_THREADS")
    differences = [(f"rollout.rollout-1.{fact}", "<absent>", "1") for fact in facts]
    (suspect,) = rank_suspects(differences, declared=(r"^engine rollout\.rollout-\d+$",))
    assert str(suspect) == (
        "execution engine rollout.rollout-1: <absent> -> there, varied on purpose"
    )
    assert not rank_suspects(differences, declared=(r"^trainer\.",))[0].declared
    # A fact that is new in an engine that both have is a suspect of its own.
    new = [("rollout.rollout-0.variables.MKL_CBWR", "<absent>", "AVX2")]
    assert [found.kind for found in rank_suspects([*differences, *new])] == [
        *("variable", "execution")
    ]


def test_what_no_pattern_knows_is_still_shown() -> None:
    (suspect,) = rank_suspects([("trainer.something_new", 1, 2)])
    assert (suspect.kind, str(suspect)) == ("other", "other something_new: 1 -> 2 (trainer)")
