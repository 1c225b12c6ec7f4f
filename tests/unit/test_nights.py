"""A night's verdict is that of its worst comparison, and what was not compared is never green."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.provenance.diff import Comparison, Divergence
from engines.provenance.suspects import rank_suspects
from engines.provenance.verdict import Verdict
from tasks.compare import LegResult
from tasks.night_page import MAX_NIGHTS, nights_markdown, render_nights
from tasks.nights import NO_BASELINE, Row, _alignment_row, about, decisive, shown_legs
from tasks.tracked_folder import verdict_tags

EQUAL = Comparison(verdict=Verdict.IDENTICAL, common_steps=2, chain_digest="9f")
FIRST = Divergence(
    step=1,
    update=0,
    probe="tokens",
    name="1/train-0/0",
    element=(3,),
    value_a=4,
    value_b=5,
    hex_a="0x4",
    hex_b="0x5",
    ulp=None,
    num_differing=1,
    num_elements=9,
    max_ulp=None,
    detail="first differing token",
)
UNEQUAL = Comparison(verdict=Verdict.DIVERGED, first=FIRST)
SUSPECTS = rank_suspects([("trainer.versions.torch", "2.13.0", "2.13.1")], declared=())
NONE_YET = Row(name="tonight = baseline", verdict=None, summary=f"{NO_BASELINE}: no green night")


def row(name: str, found: Comparison, suspects: Any = ()) -> Row:
    return Row(
        name=name,
        verdict=found.verdict,
        summary=found.headline,
        comparison=found,
        suspects=tuple(suspects),
    )


def leg(verdict: Verdict, *, on_report: bool = False) -> LegResult:
    figures = {"logprobs": {"figures": {"num_tokens": 10}}}
    failed = LegResult.failed("a", "why", verdict=verdict)
    return LegResult(
        **{
            **{name: getattr(failed, name) for name in failed.__dataclass_fields__},
            "gates": figures,
            "on_report": on_report,
        }
    )


def test_no_baseline_is_shown_and_not_counted() -> None:
    rows = (row("a = b", EQUAL), NONE_YET)
    found = decisive(rows)
    assert found is not None
    assert found.verdict is Verdict.IDENTICAL
    assert about(rows) == "a = b, no baseline"
    assert NONE_YET.to_dict()["label"] == NO_BASELINE
    assert NONE_YET.to_dict()["verdict"] is None
    # Alone it is no verdict at all.
    assert decisive((NONE_YET,)) is None


def test_the_worst_comparison_decides_and_its_first_suspect_is_named() -> None:
    rows = (row("a = b", EQUAL), row("tonight = night-1", UNEQUAL, SUSPECTS))
    found = decisive(rows)
    assert found is rows[1]
    assert about(rows) == (
        "tonight = night-1, first suspect library torch: 2.13.0 -> 2.13.1 (trainer)"
    )


def test_what_was_varied_on_purpose_is_not_called_the_first_suspect() -> None:
    declared = rank_suspects([("trainer.threads", 1, 2)], declared=("threads",))
    assert about((row("a = b", UNEQUAL, declared),)) == "a = b"


def test_the_report_shows_the_two_legs_that_decide_and_then_the_others(tmp_path: Path) -> None:
    last, tonight = tmp_path / "last", tmp_path / "tonight"
    for place in (last / "a", *(tonight / leg for leg in ("a", "b", "resume"))):
        place.mkdir(parents=True)
        (place / "ledger.jsonl").touch()
    sides = {"last/a": last / "a", "tonight/a": tonight / "a"}
    against = replace(row("tonight = last", UNEQUAL), sides=sides)
    rows = (row("a = b", EQUAL), against)
    assert list(shown_legs(tonight, rows)) == ["last/a", "tonight/a", "tonight/b", "tonight/resume"]
    assert list(shown_legs(tonight, (NONE_YET,))) == ["tonight/a", "tonight/b", "tonight/resume"]


def test_a_store_that_cannot_be_read_is_red_and_not_no_baseline() -> None:
    rows = (row("a = b", EQUAL), row("tonight", Comparison.incomparable("MLflow is down")))
    found = decisive(rows)
    assert found is not None
    assert found.verdict is Verdict.INCOMPARABLE


def test_alignment_is_the_worst_of_the_legs_and_not_claimed_on_report() -> None:
    green = _alignment_row([leg(Verdict.ALIGNED), leg(Verdict.ALIGNED)])
    assert (green.verdict, green.summary) == (
        Verdict.ALIGNED,
        "largest log-prob difference 0.0 over 20 tokens of 2 legs",
    )
    red = _alignment_row([leg(Verdict.ALIGNED), leg(Verdict.MISALIGNED)])
    assert (red.verdict, red.summary) == (Verdict.MISALIGNED, "leg a: why")
    assert _alignment_row([leg(Verdict.VACUOUS, on_report=True)]).verdict is None


def night(number: int, verdict: str = "Identical", recipe: str = "tiny_cpu") -> dict[str, Any]:
    rows = [row("a = b", EQUAL).to_dict(), NONE_YET.to_dict()]
    return {
        "run_id": f"night-{number:02}",
        "verdict": verdict,
        "headline": "<b>what was found</b>",
        "chain_digest": f"{number:032x}",
        "first_divergence": None if verdict == "Identical" else str(FIRST),
        "night": {
            "ended_at": f"2026-01-{number % 28 + 1:02} 02:15:00",
            "recipe": recipe,
            "num_steps": 8,
            "device_class": "cpu/x86_64",
            "rows": rows,
            "first_suspect": None if verdict == "Identical" else str(SUSPECTS[0]),
        },
    }


def test_the_page_shows_verdict_chain_place_suspect_and_links_and_fetches_nothing() -> None:
    page = render_nights([night(2, "Diverged"), night(1)])
    assert '<a href="night-02/report.html">' in page
    assert "no baseline" in page
    assert "step 1 update 0 tokens 1/train-0/0" in page
    assert "<b>first suspect</b> library torch: 2.13.0 -&gt; 2.13.1" in page
    assert "&lt;b&gt;what was found" in page
    for address in ("http://", "https://", "src="):
        assert address not in page
    assert page == render_nights([night(2, "Diverged"), night(1)])
    assert render_nights([]).count("No night yet") == 1


def test_the_report_of_a_night_names_claims_suspects_and_what_was_varied() -> None:
    from tasks.html_night import night_section
    from tasks.report import markdown

    red = row("tonight = night-1", UNEQUAL, SUSPECTS).to_dict()
    details = night(2, "Diverged")
    details["night"] |= {
        "rows": [{**red, "commands": ["lockstep diff night-1/a night-2/a"]}, NONE_YET.to_dict()],
        "variation": {"seed": 1, "varied": [["TZ", "Asia/Kathmandu"], ["threads", "2"]]},
    }
    page = night_section(details)
    for text in ("lockstep diff night-1/a night-2/a", "library torch", "Asia/Kathmandu"):
        assert text in page
    details["night"]["variation"]["varied"] = []
    assert "Nothing was varied." in night_section(details)
    assert night_section({"verdict": "Aligned"}) == ""
    text = markdown({**details, "legs": {}})
    assert "- tonight = night-1: Diverged\n- tonight = baseline: no baseline\n" in text
    assert "- first suspect: library torch" in text


def test_the_markdown_has_one_line_a_night() -> None:
    text = nights_markdown([night(2, "Diverged"), night(1)])
    assert len(text.splitlines()) == 4
    assert "| Diverged |" in text.splitlines()[2]


def test_the_page_keeps_the_last_thirty_of_each_recipe(tmp_path: Any) -> None:
    from engines.runs import write_json
    from tasks.night_page import read_nights

    for number in range(1, 41):
        details = night(number)
        details["night"]["ended_at"] = f"2026-01-01 00:{number:02}:00"
        write_json(tmp_path / details["run_id"] / "verdict.json", details)
    other = night(0, recipe="gsm8k_smollm2_135m")
    other["night"]["ended_at"] = "2025-01-01 00:00:00"
    write_json(tmp_path / "other" / "verdict.json", other)
    write_json(tmp_path / "no night" / "verdict.json", {"verdict": "Aligned"})
    found = read_nights(tmp_path)
    assert len(found) == MAX_NIGHTS + 1
    assert found[0]["run_id"] == "night-40"
    assert found[MAX_NIGHTS - 1]["run_id"] == "night-11"
    assert found[-1]["night"]["recipe"] == "gsm8k_smollm2_135m"


def test_a_night_is_found_again_by_its_tags() -> None:
    tags = verdict_tags(night(3, "Diverged"))
    assert tags["lockstep.night"] == "true"
    assert tags["lockstep.device_class"] == "cpu/x86_64"
    assert tags["lockstep.first_suspect"].startswith("library torch")
    # Said, since a store only adds: a night that was resumed had it.
    assert verdict_tags({"verdict": "Aligned", "chain_digest": None})["lockstep.night"] == "false"
