"""The report's page: it stands alone, escapes what it shows, and draws to scale."""

import functools
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest
from sample_reports import REPORTS, a_lossy_report, a_report, an_ngram_report, divergence

from draftsmith.decode.report import charts, figures, page
from draftsmith.decode.report.charts import STYLE, LyingBar, Series, Trend
from draftsmith.decode.report.page import visible
from draftsmith.decode.report.schema import as_report

# -------------------------------------------------------------------------------------- the page


def page_of(report: dict[str, Any]) -> str:
    return page_of_json(json.dumps(report))


@functools.cache
def page_of_json(report: str) -> str:
    return page.page(as_report(json.loads(report)))


class _Reader(HTMLParser):
    """Checks that tags are balanced, and gathers text and attributes."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def reader(html: str) -> _Reader:
    found = _Reader()
    found.feed(html)
    found.close()
    assert not found.open
    return found


def text_of(html: str) -> str:
    return " ".join(reader(html).text)


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_stands_alone(name: str) -> None:
    found = reader(page_of(REPORTS[name]()))
    assert not {"script", "link", "img", "iframe", "object"} & set(found.seen)
    attributes = {key for key, _ in found.attributes}
    assert not {"src", "href", "srcset", "data"} & attributes
    assert not [key for key in attributes if key.startswith("on")]
    assert "url(" not in STYLE and "@import" not in STYLE and "http" not in page_of(REPORTS[name]())


def test_text_from_outside_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    report = a_report(
        target=f"runs/{evil}",
        drafter={"kind": evil, "path": evil},
        device=evil,
        command=evil,
        versions={evil: evil},
        example={"prompt": evil, "pieces": [[evil, True]]},
        divergences=[divergence(evil, near_tie=False)],
        categories={evil: a_report()["categories"]["code"]},
        n_prompts=3,
    )
    assert "script" not in reader(page_of(report)).seen
    assert "alert(1)" in text_of(page_of(report))


def test_no_character_of_a_token_hides() -> None:
    shown = re.sub("<[^>]*>", "", visible("a\nb\tc\x00\x1b\u202e\u200b\u2028\xa0\ud800é日"))
    assert shown == (
        "a⏎\nb⇥\tc&lt;U+0000&gt;&lt;U+001B&gt;&lt;U+202E&gt;&lt;U+200B&gt;&lt;U+2028&gt;"
        "&lt;U+00A0&gt;&lt;U+D800&gt;é日"
    )
    # A lone surrogate can't be written as UTF-8; the page can.
    page_of(a_report(example={"prompt": "\ud800", "pieces": []})).encode()


def test_the_example_shows_who_wrote_what() -> None:
    html = page_of(a_report())
    assert '<span class="drafted">x</span><span class="written"> &lt;b&gt;</span>' in html
    assert "2 of 3 tokens came from the draft" in html
    assert "An example" not in page_of(an_ngram_report())


def test_absent_data_has_its_words() -> None:
    text = text_of(page_of(an_ngram_report()))
    for words in ("Nothing was drafted.", "No round was decoded.", "was not timed", "No ideal can"):
        assert words in text, words
    assert "None" not in text and "nan" not in text
    assert "the machine was busier" in text_of(page_of(a_report(efficiency=1.2)))


def test_all_differences_are_on_the_page() -> None:
    rows = re.findall(r'<td class="n">(\d+)</td><td class="n">7</td>', page_of(REPORTS["many"]()))
    assert rows == [str(i) for i in range(30)]


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_shows_each_figure_with_its_formula(name: str) -> None:
    report = REPORTS[name]()
    text = " ".join(text_of(page_of(report)).split())
    for row in figures.figures(as_report(report)):
        line = " ".join(f"{row.name} {row.value} {row.interval} {row.formula}".split())
        assert line in text, line


@pytest.mark.parametrize("near_tie", [True, False])
def test_the_page_begins_with_the_verdict(near_tie: bool) -> None:
    report = a_report(divergences=[divergence("float32", near_tie=near_tie)])
    report["identical"] |= {"same": 3, "worst_margin": 0.25}
    found, html = figures.verdict(as_report(report)), page_of(report)
    assert f'class="verdict {"near" if near_tie else "bad"}"' in html
    assert found.headline in text_of(html) and found.detail in text_of(html)
    assert ("but not the target&#39;s output</h1>" in html) != near_tie


def test_the_headline_says_no_more_than_the_interval() -> None:
    assert "1.63\u00d7 the speed of plain decoding</h1>" in page_of(a_report())
    assert "no clear difference" in page_of(a_report(speedup_interval=[0.97, 1.71]))
    one_batch = page_of(REPORTS["one batch"]())
    assert "1.63\u00d7: no clear difference" in one_batch and "whisker:" not in one_batch
    assert "whisker: 95% interval over prompts" in page_of(a_report())
    assert "whisker: 95% interval over batches" in page_of(a_report(batch=2))
    assert "slower than plain" in page_of(a_report(speedup=0.9, speedup_interval=[0.8, 0.97]))
    assert ", LOSSY (typical:0.09,0.3)</h1>" in page_of(a_lossy_report())


def test_a_lossy_page_shows_what_answers_are_worth_beside_tau() -> None:
    card = '<p class="eyebrow">([^<]*)</p><p class="value">([^<]*)</p><p class="between">([^<]*)'
    cards = re.findall(card, page_of(REPORTS["lossy, with a task"]()))
    task = ("exact match, gsm8k", "25.0%", "(plain 50.0%, n = 4)")
    assert cards[1:3] == [("Block efficiency tau", "2.25", "[2.10, 2.40]"), task]
    assert ("agreement with plain", "0.812", "[0.700, 0.900]") in cards


def test_spec_bench_has_its_own_table() -> None:
    text = " ".join(text_of(page_of(REPORTS["Spec-Bench"]())).split())
    assert "as Spec-Bench groups them" in text and "mt_bench 3 2.31" in text
    assert "Skipped: 2 of 6 prompts" in text


# --------------------------------------------------------------------------------------- charts


Box = tuple[float, float, float, float]  # left, top, right, bottom
SVG = "{http://www.w3.org/2000/svg}"


def drawn(html: str) -> list[ET.Element]:
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", html, re.S)]


def box(path: str) -> Box:
    """What a path of straight lines covers."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", path)]
    x, y = numbers[::2], numbers[1::2]
    return min(x), min(y), max(x), max(y)


def hinted(picture: ET.Element) -> dict[str, Box]:
    """The bars of a picture, by what they tell who points at them."""
    groups = [g for g in picture.iter() if len(g) and g[0].tag.endswith("title")]
    return {str(g[0].text): box(g[1].attrib["d"]) for g in groups}


def tall(bars: dict[str, Box]) -> list[float]:
    return [bottom - top for _, top, _, bottom in bars.values()]


def long(bars: dict[str, Box]) -> list[float]:
    return [right - left for left, _, right, _ in bars.values()]


def texts(picture: ET.Element) -> list[str]:
    return [str(one.text) for one in picture.iter() if one.tag.endswith("text")]


@pytest.mark.parametrize("name", REPORTS)
def test_charts_are_inside_their_frames_and_labelled(name: str) -> None:
    for picture in drawn(page_of(REPORTS[name]())):
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        assert picture.attrib["role"] == "img"
        spoken, bars = picture.attrib["aria-label"], hinted(picture)
        assert bars and all(hint in spoken for hint in bars)
        for one in picture.iter("path"):
            left, top, right, bottom = box(one.attrib["d"])
            assert left >= 0 and top >= 0 and right <= width and bottom <= height
        for text in picture.iter("text"):
            turned = re.match(r"translate\((\S+) (\S+)\)", text.attrib.get("transform", ""))
            x, y = turned.groups() if turned else (text.attrib["x"], text.attrib["y"])
            assert 0 <= float(x) <= width and 0 < float(y) <= height


def test_columns_are_as_tall_as_their_values() -> None:
    by_position, histogram = drawn(page_of(a_report()))[:2]
    heights = tall(hinted(by_position))
    assert [h / heights[0] for h in heights] == pytest.approx([1, 0.5 / 0.75, 1, 0.667 / 0.75])
    assert "drafted position 1, of rounds that got there: 0.75" in hinted(by_position)
    assert {"0.75", "0.50", "0.67", "drafted position", "share accepted"} <= set(texts(by_position))
    heights = tall(hinted(histogram))
    assert [h / heights[0] for h in heights] == pytest.approx([1, 1.2, 1.8])
    assert {"25%", "30%", "45%"} <= set(texts(histogram))


def test_lanes_are_as_long_as_their_values() -> None:
    report = a_report()
    speed, parts = drawn(page_of(report))[2:]
    bars = hinted(speed)
    unit = long(bars)[0] / report["speedup"]
    values = [report[key] for key in ("speedup", "speedup_specbench", "ideal_speedup", "mbsu")]
    assert [length / unit for length in long(bars)] == pytest.approx(values)
    start = next(iter(bars.values()))[0]
    dashed = [box(p.attrib["d"]) for p in speed.iter("path") if "dasharray" in p.attrib["style"]]
    assert [line[0] for line in dashed] == pytest.approx([start + unit])
    whiskers = [box(p.attrib["d"]) for p in speed.iter("path") if "var(--ink)" in p.attrib["style"]]
    ends = [start + unit * value for value in report["speedup_interval"]]
    assert any((left, right) == pytest.approx(ends) for left, _, right, _ in whiskers)
    # tau * t_plain above, K * t_draft and t_verify below.
    plain, draft, check = long(hinted(parts))
    assert plain / (draft + check) == pytest.approx(report["ideal_speedup"], abs=0.01)


def test_points_lie_at_their_values() -> None:
    """Along a logarithm, in three colours that the reader's scheme decides; the last one hollow."""
    values = [(1e3, 0.1), (1e4, 0.2), (1e6, 0.4)]
    trend = Trend("1M", "c", values[:2], values[2:], [values[0], values[2]])
    chart = charts.scatter("alpha", [trend], x_label="tokens", y_label="alpha")
    picture = ET.fromstring(charts.drawing([chart], [("c", "a size")]))
    dots = [use for use in picture.iter(f"{SVG}use")]
    x, y = ([float(dot.attrib[way]) for dot in dots] for way in "xy")
    assert (x[1] - x[0]) / (x[2] - x[0]) == pytest.approx(1 / 3, abs=1e-3)
    assert (y[1] - y[0]) / (y[2] - y[0]) == pytest.approx(1 / 3, abs=1e-3)
    fills = [re.findall(r"fill: var\(--(\w+)\)", dot.attrib["style"])[0] for dot in dots]
    assert fills == ["c", "c", "card"]
    assert "1M, 10k: 0.2" in picture.attrib["aria-label"]
    assert {"1k", "10k", "1M", "a size", "alpha"} <= set(texts(picture))


def test_a_picture_is_a_file_of_its_own_and_the_same_each_time() -> None:
    evil = "<b>&$x$"
    series = [Series(evil, "a", [1, 2], str)]
    bars = [LyingBar(evil, [("d", 3.0, evil)], "3")]
    both = [
        charts.columns(evil, ["x", evil], series, x_label=evil, y_label=evil),
        charts.lanes(evil, bars, x_label="ms"),
    ]
    text = charts.drawing(both, [("a", evil)])
    picture = ET.fromstring(text)
    assert text == charts.drawing(both, [("a", evil)])
    assert STYLE in text and "#c0ffe" not in text and "font-family: system-ui" in text
    assert evil in texts(picture) and f"{evil} x, {evil}: 1" in hinted(picture)
    assert not [one for one in picture.iter() if one.tag in (f"{SVG}b", f"{SVG}image")]


@pytest.mark.parametrize("peak", [1e-6, 0.03, 0.5, 1.0, 1.01, 7, 99.9, 100, 12345])
def test_ticks_are_few_round_and_reach_the_peak(peak: float) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=charts.LOOK):
        axes = Figure().subplots()
    axes.bar([0, 1], [0, peak])
    charts._round(axes.yaxis)
    steps = list(axes.get_yticks())
    assert axes.get_ylim() == (steps[0], steps[-1]) and steps[0] == 0 and 3 <= len(steps) <= 7
    assert steps[-1] >= peak * (1 - 1e-9) and steps[-2] < peak


# --------------------------------------------------------------------------------------- colours


def colours(scheme: int) -> dict[str, str]:
    """The variables of the light (0) or dark (1) scheme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[scheme]))


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2: from 1, equal, to 21, black on white."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_and_bars_stand_out(scheme: int) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    found = colours(scheme)
    on = [(ink, ground) for ink in ("ink", "soft") for ground in ("page", "card")]
    on += [(f"on-{bar}", bar) for bar in "abcd"]
    on += [(level, f"{level}-bg") for level in ("good", "near", "bad", "note")]
    on += [("ink", f"{level}-bg") for level in ("good", "near", "bad", "note")]
    on += [("drafted-ink", "drafted"), ("target-ink", "page"), ("target-ink", "card")]
    weak = {pair: contrast(*(found[name] for name in pair)) for pair in on}
    assert not {pair: ratio for pair, ratio in weak.items() if ratio < 4.5}
    bars = {bar: contrast(found[bar], found["card"]) for bar in "abcd"}
    assert not {bar: ratio for bar, ratio in bars.items() if ratio < 3}
    assert contrast(found["a"], found["b"]) > 1.8, "the two series are told apart by lightness"
