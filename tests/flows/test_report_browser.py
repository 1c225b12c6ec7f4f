"""The page in a real browser: no error, no overflow at two widths, a strip that answers a click.

The run is synthetic, so that it can differ everywhere that a page can show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines.faults import flip_bit
from engines.provenance.diff import compare_ledgers
from engines.provenance.lock import LockRow, append_row
from engines.runs import write_json
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.registry import load_recipe
from tasks.compared_amounts import compared_amounts
from tasks.html_report import render
from tasks.plots import write_plots
from tests.flows.browser import CHROMIUM, NAMES, Browser, chromium
from tests.unit.provenance.test_diff import write_leg

STEPS = 6
WIDTHS = (1280, 390)
SMALLEST_FONT_PX = 11


def diverged_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A twin of six steps whose gradients part at step 3, and a completion at step 4."""

    def change(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step >= 3:
            for element in range(4):
                flip_bit(tensors["grads"]["layers.2.w"], element, 3 * element)
        if step >= 4:
            values["tokens"][f"{step}/p2/0"] = [3, 9]

    spec = load_recipe("tiny_cpu")
    trajectory = trajectory_fingerprint(spec)
    write_json(folder / "spec.json", json.loads(spec.model_dump_json()))
    for name in "ab":
        leg = write_leg(
            folder / name,
            num_steps=STEPS,
            trajectory=trajectory,
            change=change if name == "b" else None,
        )
        write_tables(leg, name, trajectory)
    found = compare_ledgers(folder / "a", folder / "b")
    details = {
        "run_id": folder.name,
        "verdict": str(found.verdict),
        "headline": found.headline,
        "chain_digest": "0" * 32,
        "alignment": {"max_abs_diff": 0.0, "num_tokens": 6068, "exact_fraction": 1.0},
        "native_control": {"verdict": "Misaligned", "max_abs_diff": 0.02575993537902832},
        "comparison": found.to_dict(),
        "legs": {},
    }
    return folder, json.loads(json.dumps(details))


def write_tables(leg: Path, name: str, trajectory: str) -> None:
    """What a leg leaves beside its ledger."""
    rows = [
        {
            "step": step,
            "request_id": f"{step}/p{prompt}/0",
            "prompt_id": f"p{prompt}",
            "prompt": "<|start|>user\nWhat is 75 - 71?<|end|>\n",
            "completion": "so " * 30 + ("five" if name == "b" and step > 3 else "four"),
            "label": "4",
            "reward": 0.5,
            "advantage": -0.25,
            "length": 2,
            "finish_reason": "stop",
            "worst_logprob_diff": 0.0,
        }
        for step in range(1, STEPS + 1)
        for prompt in (2, 10, 11)
    ]
    (leg / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gates = {
        "logprobs": ("Aligned", "max 0.0 over 3034 tokens, 100.00% exactly equal"),
        "native control": ("Misaligned", "native ops differ: max 0.02575993537902832"),
    }
    facts = {gate: {"verdict": v, "summary": s, "holds": True} for gate, (v, s) in gates.items()}
    write_json(leg / "gates.json", facts)
    versions = {"torch": "2.13.0+cpu" if name == "a" else "2.13.1+cpu"}
    write_json(leg / "environment.json", {"trainer": {"versions": versions}, "fingerprint": name})
    for number, stage in enumerate(("download", "convert", "train", "checkpoint")):
        row = LockRow(
            stage=stage,
            version=1,
            inputs={},
            outputs={stage: f"{number}" * 32} if number != 2 else {},
            trajectory=trajectory,
            attempt=1,
            cached=False,
            ambient={"seconds": 1.5},
        )
        append_row(leg, row)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run folder and its verdict."""
    folder = tmp_path_factory.mktemp("runs") / "diverged"
    folder.mkdir()
    return diverged_run(folder)


@pytest.fixture(scope="module")
def page_file(run: tuple[Path, dict[str, Any]]) -> Path:
    """The page of the run."""
    path = run[0] / "report.html"
    path.write_text(render(*run), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    if CHROMIUM is None:
        pytest.skip(f"not run: no browser on this machine (looked for {', '.join(NAMES)})")
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


def test_the_page_says_all_that_was_found(page_file: Path) -> None:
    text = page_file.read_text()
    for said in (
        "<h1>Diverged</h1>",
        "lockstep diff diverged/a diverged/b --reproduce",
        "layers.2.w",
        "elements by ULP",
        "First completion that differs",
        "the texts part at token 1",
        "<mark>9</mark>",
        "trainer.versions.torch",
        "2.13.1+cpu",
        "vLLM&#x27;s native ops",
        "native control",
        "Completions of step 6",
        "stages from a cache",
    ):
        assert said in text
    for outside in ("http://", "https://", "src=", "href=", "@import", "url("):
        assert outside not in text


def test_the_same_files_give_the_same_page_and_the_same_plots(
    run: tuple[Path, dict[str, Any]], page_file: Path, tmp_path: Path
) -> None:
    folder, details = run
    assert render(folder, details) == page_file.read_text()
    found = {name: folder / name for name in "ab"}
    names = [write_plots(tmp_path / str(n), found, details["comparison"]) for n in (1, 2)]
    assert names[0] == names[1] == ("curves.png", "strip.png", "ulp.png")
    for name in names[0]:
        first, second = ((tmp_path / str(number) / name).read_bytes() for number in (1, 2))
        assert first == second
        assert first.startswith(b"\x89PNG")
        assert b"Software" not in first


def test_the_page_holds_nothing_that_runs_of_the_same_bits_do_not_share(
    page_file: Path, tmp_path: Path
) -> None:
    folder, details = diverged_run(tmp_path / "diverged")
    for leg in "ab":
        lock = read_json(folder / leg / "lock.json")
        for row in lock["rows"]:
            row["attempt"], row["ambient"]["seconds"] = 2, 73.25
        write_json(folder / leg / "lock.json", lock)
        (folder / leg / "metrics.jsonl").write_text('{"step": 1, "metrics": {"perf/step_s": 9}}')
    assert render(folder, details) == page_file.read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_shows_no_error_and_fits_its_width(
    browser: Browser, page_file: Path, width: int, dark: bool
) -> None:
    page = browser.open(page_file, width=width, dark=dark)
    assert page.problems() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = (
        "[...document.querySelectorAll('body *')].filter(e => e.children.length === 0 &&"
        " e.textContent.trim() && !e.closest('svg, script') &&"
        f" parseFloat(getComputedStyle(e).fontSize) < {SMALLEST_FONT_PX}).map(e => e.outerHTML)"
    )
    assert page.evaluate(small) == []
    beyond = (
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') &&"
        " e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 200))"
    )
    assert page.evaluate(beyond) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_the_strip_shows_the_place_and_both_roots(
    browser: Browser, run: tuple[Path, dict[str, Any]], page_file: Path, width: int
) -> None:
    from engines.provenance.ledger import read_ledger

    lines = [read_ledger(run[0] / name).lines for name in "ab"]
    page = browser.open(page_file, width=width)
    shown = "document.getElementById('picked').innerText"
    for root in (lines[0][3].roots["grads"], lines[1][3].roots["grads"]):
        assert root in page.evaluate(shown), "the first difference is chosen from the start"
    page.click("tr:nth-child(2) td:nth-child(3) button")  # tokens of step 1
    text = page.evaluate(shown)
    assert "step 1 update 0 tokens" in text
    assert "equal" in text
    assert text.count(lines[0][1].roots["tokens"]) == 2
    page.press("ArrowRight")
    assert "step 2 update 0 tokens" in page.evaluate(shown)
    page.press("ArrowUp")
    assert "step 2 update 0 prompts" in page.evaluate(shown)
    assert page.evaluate("document.querySelectorAll('.chosen').length") == 1
    assert page.problems() == []


def test_an_error_in_a_page_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    """The control of the tests above."""
    path = tmp_path / "broken.html"
    path.write_text("<body style='width: 2000px'><script>nothing.here()</script></body>")
    page = browser.open(path, width=390)
    assert any("nothing is not defined" in problem for problem in page.problems())
    assert page.evaluate("document.documentElement.scrollWidth") > 390


def test_the_bytes_under_the_digests_are_those_of_the_named_tensors(
    run: tuple[Path, dict[str, Any]],
) -> None:
    leg = run[0] / "a"
    assert compared_amounts(leg, updates=3).tensor_bytes is None
    model = leg / "model"
    model.mkdir()
    shapes = {"layers.2.w": torch.zeros(2, 3), "layers.10.w": torch.zeros(4)}
    save_file(shapes, model / "model.safetensors")
    try:
        # Line 0 has weights (4 bytes an element), sent and received (bfloat16); steps have all.
        assert compared_amounts(leg, updates=3).tensor_bytes == 10 * (8 + 2 * 16)
        parted = compared_amounts(leg, updates=3, first_probe="weights")
        assert parted.tensor_bytes == 10 * (8 + 2 * 16 + 8)
        assert compared_amounts(leg, updates=3, first_probe="ledger").tensor_bytes == 400
    finally:
        shutil.rmtree(model)
