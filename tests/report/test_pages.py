"""Pages and pictures of a run, and two runs side by side: made from JSON records, read back, opened in a browser."""

from __future__ import annotations

import copy
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanofw.errors import ConfigError
from nanofw.report import compare, page, plots
from nanofw.report.read import by_label, read

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def record() -> dict[str, Any]:
    """A real one: `nanofw bench --json --html` on two cores of a server."""
    return read(HERE / "recorded.json")


def changed(record: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same run, with every rate `factor` times as high."""
    other = copy.deepcopy(record)
    for point in other["points"]:
        for name in compare.FIGURES:
            rate = point[name]
            rate["median"] *= factor
            rate["rounds"] = [value * factor for value in rate["rounds"]]
    return other


def test_what_a_page_says(record: dict[str, Any]) -> None:
    text = page.page(record)
    assert len(text) < 2_000_000
    for label, points in by_label(record).items():
        assert f"<h3>{label}</h3>" in text
        for p in points:
            assert f"{p['decode_ms']['median']:,.2f} ms" in text
    assert record["machine"]["cpu"] in text
    assert "B*ctx small copies" in text
    assert "roofline" in text
    assert text.count('class="holds"') == sum(law["holds"] for laws in record["laws"].values() for law in laws)
    assert 'class="broken"' not in text
    assert "attention naive-gather" in text


def test_a_page_needs_nothing_beside_itself(record: dict[str, Any]) -> None:
    text = page.page(record)
    assert "<script" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:,|#)[^"']*""", text)
    assert "url(http" not in text
    assert "@import" not in text
    ids = re.findall(r' id="([^"]+)"', text)
    defined = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(set(defined)) == len(defined)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_names_are_escaped(record: dict[str, Any]) -> None:
    hostile = "<b>&x"
    record["combinations"] = {hostile: record["combinations"]["naive-gather"]}
    record["points"] = record["points"][: len(record["points"]) // 2]
    record["explained"] = {hostile: record["explained"]["naive-gather"]}
    text = page.page(record)
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;x" in text


def test_broken_laws_and_a_slow_gpu_are_seen(record: dict[str, Any]) -> None:
    record["laws"]["attention naive-gather"][0]["holds"] = False
    record["telemetry"] = {"name": "Paper 4000", "driver": "1", "samples": 4, "throttled": {"temperature": 2}}
    record["telemetry"] |= {"other_processes": 1, "sm_mhz": {"min": 1, "median": 2, "max": 3}}
    text = page.page(record)
    assert text.count('class="broken"') == 1
    assert "Paper 4000 ran below its clocks in 2 of 4 samples: temperature" in text
    assert "Paper 4000 was shared" in text
    assert "min 1, median 2, max 3" in text


@pytest.mark.parametrize(("waited", "told"), [(None, False), (0.0, False), (0.05, False), (0.31, True)])
def test_a_run_beside_other_programs_says_so(record: dict[str, Any], waited: float | None, told: bool) -> None:
    crowded = record | {"waited": waited}
    assert ("which waited for a processor in 31% of its time" in page.page(crowded)) is told
    found = compare.compare(record, crowded)
    assert [doubt.partition(":")[0] for doubt in found.doubts] == ["second"] * told
    assert ("second: other programs ran beside this one" in compare.page(record, crowded, ("a", "b"))) is told


def test_an_old_record_has_a_page_too(record: dict[str, Any], tmp_path: Path) -> None:
    old = {name: record[name] for name in ("machine", "settings", "combinations", "points")} | {"format": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    text = page.page(read(tmp_path / "old.json"))
    assert "Not judged" in text
    assert ">roofline<" not in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a report of nanofw bench"),
        ('{"points": [], "combinations": {}, "format": 99}', "has format 99; this version reads 1, 2"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "missing.json")


def test_a_picture_is_large_enough_for_paper(record: dict[str, Any], tmp_path: Path) -> None:
    plots.png(plots.scaling(plots.curves(record), record["roofline"]), tmp_path / "x.png")
    head = (tmp_path / "x.png").read_bytes()
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20]) == 1920


def test_curves_are_those_of_the_record(record: dict[str, Any]) -> None:
    for curve, (label, points) in zip(plots.curves(record), by_label(record).items(), strict=True):
        assert curve.label == label
        assert list(curve.median) == [p["decode_tok_s"]["median"] for p in points]
        assert list(curve.low) == [min(p["decode_tok_s"]["rounds"]) for p in points]


def test_equal_runs_are_not_told_apart(record: dict[str, Any]) -> None:
    found = compare.compare(record, copy.deepcopy(record))
    assert found.differs == found.missing == []
    assert {r.verdict for r in found.ratios} == {""}
    assert {r.ratio for r in found.ratios} == {1.0}
    assert compare.verdict(found) == f"Of {len(found.ratios)} figures {len(found.ratios)} not told apart."


@pytest.mark.parametrize(("factor", "word"), [(3.0, "faster"), (1 / 3, "slower")])
def test_a_real_change_is_told(record: dict[str, Any], factor: float, word: str) -> None:
    found = compare.compare(record, changed(record, factor))
    assert {r.verdict for r in found.ratios} == {word}
    for r in found.ratios:
        assert r.low <= r.ratio <= r.high
        assert r.ratio == pytest.approx(factor)
        assert r.confidence == pytest.approx((1 - 2.0 ** (1 - 3)) ** 2)
    assert f"{len(found.ratios)} {word}" in compare.verdict(found)


def test_what_differs_besides_comes_first(record: dict[str, Any]) -> None:
    other = copy.deepcopy(record)
    other["machine"]["torch"] = "9.9"
    other["settings"]["seed"] = 7
    other["combinations"]["naive-gather"]["resolved"]["scheduler"]["name"] = "static"
    differs = {name: (a, b) for name, a, b in compare.compare(record, other).differs}
    assert differs["torch"] == (record["machine"]["torch"], "9.9")
    assert differs["seed"] == ("0", "7")
    assert differs["scheduler of naive-gather"][1].startswith("static ")
    text = compare.page(record, other, ("before", "after"))
    assert text.index("What differs besides") < text.index("Ratios")


def test_what_only_one_has_is_listed(record: dict[str, Any]) -> None:
    other = copy.deepcopy(record)
    del other["combinations"]["naive-gather"]
    other["points"] = [p for p in other["points"] if p["attention"] != "naive-gather" and p["batch"] != 4]
    found = compare.compare(record, other)
    assert "naive-gather is only in the first" in found.missing
    assert "vectorized-gather: batch 4 is only in the first" in found.missing
    assert {r.label for r in found.ratios} == {"vectorized-gather"}


def test_two_single_combinations_are_compared_whatever_their_names(record: dict[str, Any]) -> None:
    one, two = copy.deepcopy(record), copy.deepcopy(record)
    for part, name in ((one, "naive-gather"), (two, "vectorized-gather")):
        part["combinations"] = {name: part["combinations"][name]}
        part["points"] = [p for p in part["points"] if p["attention"] == name]
    found = compare.compare(one, two)
    assert {r.label for r in found.ratios} == {"vectorized-gather against naive-gather"}
    assert "attention of naive-gather" in {name for name, *_ in found.differs}


PROBE = """
<script>
addEventListener("load", () => {
  const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = color => channels(color).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  let least = 99, worst = "";
  for (const node of document.querySelectorAll("h1, h2, h3, p, td, th, span, text")) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), ink = light(node.tagName === "text" ? style.fill : style.color);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < least) { least = ratio; worst = node.textContent.trim().slice(0, 40); }
  }
  const found = {
    width: innerWidth, content: document.documentElement.scrollWidth, contrast: least, worst: worst, paper: paper,
    fetched: performance.getEntriesByType("resource").map(entry => entry.name),
    pictures: [...document.querySelectorAll("figure svg")].filter(svg => svg.getClientRects().length).length,
    smallest: Math.min(...[...document.querySelectorAll("figure text")].filter(t => t.getClientRects().length)
      .map(t => t.getBoundingClientRect().height)),
  };
  parent.document.body.dataset.found = encodeURIComponent(JSON.stringify(found));
});
</script>
"""


def opened(file: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page: with a probe added to it, which notes sizes and colours."""
    if CHROMIUM is None:
        missing = "no chromium is installed: apt install chromium"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    inside = html.escape(file.read_text().replace("</body>", PROBE + "</body>"))
    probed = file.with_suffix(".probed.html")  # a frame, since no window is as narrow as a phone
    probed.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<body><iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inside}"></iframe>'
    )
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={file.parent / 'profile'}",
            "--window-size=1400,1000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-found="([^"]+)"', done.stdout)
    assert found, done.stdout[-2000:]
    from urllib.parse import unquote

    values: dict[str, Any] = json.loads(unquote(found[1]))
    return values


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
@pytest.mark.parametrize("kind", ["one run", "two runs"])
def test_in_a_browser(record: dict[str, Any], tmp_path: Path, kind: str, width: int, dark: bool) -> None:
    """No sideways scrolling, nothing fetched, text that can be read, in light and in dark."""
    two = compare.page(record, changed(record, 1.1), ("before", "after")) if kind == "two runs" else None
    file = tmp_path / "page.html"
    file.write_text(two or page.page(record), encoding="utf-8")
    found = opened(file, width, dark)
    assert found["width"] == width
    assert found["content"] <= width
    assert found["fetched"] == []
    assert found["pictures"] == 1
    assert found["smallest"] >= 9
    assert (found["paper"] < 0.1) is dark
    assert found["contrast"] >= 4.5, found["worst"]


@pytest.mark.parametrize(
    ("right", "wrong", "seen"),
    [
        (".scroll { overflow-x: auto; }", "", lambda found: found["content"] > found["width"]),
        ("--faint: #6b6b70", "--faint: #b0b0b0", lambda found: found["contrast"] < 4.5),
        ('href="data:,"', 'href="data:,"><img src="http://127.0.0.1:9/missing.png"', lambda found: found["fetched"]),
    ],
    ids=["too wide", "too pale", "not alone"],
)
def test_the_browser_would_notice(record: dict[str, Any], tmp_path: Path, right: str, wrong: str, seen: Any) -> None:
    text = page.page(record)
    assert right in text
    (tmp_path / "page.html").write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert seen(opened(tmp_path / "page.html", 390, dark=False))
