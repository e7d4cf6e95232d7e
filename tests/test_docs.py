"""Links and paths in the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = tuple(sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]))


def dead(text: str, page: Path) -> list[str]:
    """Return relative links, and paths of the package or the tests in code type, that lead nowhere from a page."""
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not re.match(r"[a-z]+:", link)]
    links += re.findall(r"<img [^>]*src=\"([^\":]+)\"", text)
    paths = re.findall(r"`((?:crosstraffic|tests|docs)/[\w./-]+)`", text)
    return [link for link in links if not (page.parent / link).exists()] + [
        path for path in paths if not (REPOSITORY / path).exists()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead(page.read_text(encoding="utf-8"), page) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](index.md) [b](gone.md#x) [c](https://e.org) ![d](no.png) `crosstraffic/cli.py` `crosstraffic/no.py`"
    assert dead(text, REPOSITORY / "docs" / "development.md") == ["gone.md", "no.png", "crosstraffic/no.py"]
