import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import curves, make_run, predictions, validation
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.results.report import render
from crosstraffic.results.store import Run, load_run
from crosstraffic.results.summary import steps_table, summary_data, summary_table

LATE = {"rank": 2, "late_s": 1e-3, "num_records": 9, "share": 0.9}
HOSTILE = "<script>alert(1)</script>&\"'--><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open[: len(self.open) - self.open[::-1].index(tag) - 1]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data + " "


def whole_page(run: Run) -> str:
    return render(run, {"notes": ["a note"]}, predictions(run), validation(), curves(run))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(make_run(tmp_path_factory.mktemp("report") / "run"))


@pytest.fixture(scope="module")
def page(run: Run) -> str:
    return whole_page(run)


def test_one_file_that_asks_nothing_of_the_network(page: str) -> None:
    assert len(page.encode()) < 3_000_000
    allowed = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= allowed
    assert "@import" not in page
    for tag, attributes in Page(page).tags:
        assert tag not in ("script", "iframe", "object", "embed")
        link = attributes.get("src") or attributes.get("href") or attributes.get("xlink:href") or "#"
        assert link.startswith(("#", "data:,"))


def test_ids_are_unique_and_references_lead_somewhere(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Page(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", page)) <= set(ids)


def test_every_picture_has_an_alternative_text_and_tables_beneath(page: str) -> None:
    pictures = [attributes for _, attributes in Page(page).tags if attributes.get("role") == "img"]
    assert len(pictures) >= 14
    assert all(len(attributes["aria-label"] or "") > 20 for attributes in pictures)
    assert page.count("<details") > 14


@pytest.mark.parametrize(
    "words",
    [
        "Qwen3-30B-A3B", "tp=2,cp=2,ep=4", "synthetic-host", "simulated", "complete", "Worst neighbours",
        "tp.attention_output", "pd.kv", "5.2 %", "repeat noise 3.1 %", "8.3 % on whole steps",
        "pairs (fitted)", "63 %", "every byte as sent", "alpha_beta",
        "Steady: both loop", "One-shot", "sp.all_gather + ep.dispatch + pd.kv", "lane 2, alone", "OMP_NUM_THREADS",
        "node 0", "480 MiB", "order statistics", "a note", "streams overlapped 70% of the time",
    ],
)  # fmt: skip
def test_the_page_says(page: str, words: str) -> None:
    assert words in re.sub(r"\s+", " ", Page(page).words)


def test_colours_follow_the_scheme(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "var(--ink)" in page
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "#1b2530" not in svgs
    assert "#000000" not in svgs


def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = {"pd.kv": f"pd.{HOSTILE}", "sp.all_gather": "sp.$x^2$_{y}"}
    scenario = {"name": HOSTILE, "model": HOSTILE}
    hostile = {"scenario": scenario, "environment": {"OMP_NUM_THREADS": HOSTILE}, "notes": [HOSTILE]}
    path = make_run(tmp_path / "run", host=HOSTILE, rename=names, num_sizes=3, **hostile)
    text = whole_page(load_run(path))
    found = Page(text)
    assert not [tag for tag, _ in found.tags if tag in ("script", "img")]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert found.words.count("alert(1)") > 5
    assert "sp.$x^2$_{y}" in found.words


def without(run: Run, *parts: str) -> dict[str, Any]:
    whole = {"model": None, "predictions": predictions(run), "validation": validation(), "curves": curves(run)}
    return {name: None if name in parts else value for name, value in whole.items()}


@pytest.mark.parametrize(
    ("options", "parts", "words"),
    [
        pytest.param({"pairs": False}, (), "There are no slowdowns: no streams ran together", id="no pairs"),
        pytest.param({"with_steps": False}, (), "This run has no whole steps", id="no steps"),
        pytest.param({}, ("predictions", "validation", "curves"), "No fitted model came with this", id="no model"),
        pytest.param({}, ("validation",), "no validation came with this report", id="no validation"),
        pytest.param({"status": "interrupted"}, (), "This run is interrupted: interrupted by", id="interrupted"),
        pytest.param({"num_ranks": 1}, (), "one rank has nobody to share links with", id="one rank"),
        pytest.param({"measured_share": None, "wall_s": None}, (), "measured share – of the wall", id="no end"),
        pytest.param({"late_ranks": [LATE]}, (), "rank 2 by 1 ms, in 90 % of the points", id="late"),
    ],
)  # fmt: skip
def test_what_is_absent_is_said(tmp_path: Path, options: dict[str, Any], parts: tuple[str, ...], words: str) -> None:
    run = load_run(make_run(tmp_path / "run", num_sizes=4, **options))
    text = render(run, **without(run, *parts))
    assert words in re.sub(r"\s+", " ", Page(text).words)


def test_a_run_without_a_single_record_has_a_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", status="failed", num_sizes=2)
    (path / "records.jsonl").write_text("")
    text = re.sub(r"\s+", " ", Page(render(load_run(path))).words)
    for words in ("There are no records yet", "No stream was measured alone", "No whole step was measured"):
        assert words in text


def test_failures_are_shown_not_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_sizes=3)
    lines = (path / "records.jsonl").read_text().splitlines()
    first = lines[0].replace('"status":"ok"', '"status":"wrong_data"').replace('"why":null', '"why":"byte 7 is wrong"')
    (path / "records.jsonl").write_text("\n".join([first, *lines[1:], lines[1][:40]]))
    text = re.sub(r"\s+", " ", Page(render(load_run(path))).words)
    assert "byte 7 is wrong" in text
    assert "1 records with wrong bytes" in text
    assert "1 torn lines left out" in text


def test_the_command_writes_the_page_and_prints_its_path(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_sizes=6, pairs=False, with_steps=False)
    target = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(path), "--output", str(target)])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(target)
    assert "Can the model be trusted" in target.read_text(encoding="utf-8")
    assert "fitted model with its interval" in target.read_text(encoding="utf-8")


def test_a_run_too_small_to_fit_still_gets_its_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", status="interrupted", num_sizes=2)
    (path / "records.jsonl").write_text("")
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 0, done.output
    assert "could not be fitted" in done.stderr
    assert (path / "report.html").exists()


def test_the_summary_for_a_terminal_and_for_programs(run: Run) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(summary_table(run))
    console.print(steps_table(run, predictions(run)))
    text = console.export_text()
    assert "most by" in text
    assert "pd.kv" in text
    assert "prefill" in text
    data = summary_data(run)
    assert data["streams"][0]["stream"] == "sp.all_gather"
    assert data["streams"][2]["busbw_bytes_per_s"] is None
    assert {row["step"] for row in data["steps"]} == {"prefill", "decode", "handoff"}
