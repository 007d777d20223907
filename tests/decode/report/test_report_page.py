"""The report's page: it stands alone, escapes what it shows, and draws to scale."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from sample_reports import REPORTS, a_lossy_report, a_report, an_ngram_report, divergence

from draftsmith.decode.report import figures, svg
from draftsmith.decode.report.page import page, visible
from draftsmith.decode.report.style import STYLE

# -------------------------------------------------------------------------------------- the page


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
    found = reader(page(REPORTS[name]()))
    assert not {"script", "link", "img", "iframe", "object"} & set(found.seen)
    attributes = {key for key, _ in found.attributes}
    assert not {"src", "href", "srcset", "data"} & attributes
    assert not [key for key in attributes if key.startswith("on")]
    assert "url(" not in STYLE and "@import" not in STYLE and "http" not in page(REPORTS[name]())


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
    )
    assert "script" not in reader(page(report)).seen
    assert "alert(1)" in text_of(page(report))


def test_no_character_of_a_token_hides() -> None:
    shown = re.sub("<[^>]*>", "", visible("a\nb\tc\x00\x1b\u202e\u200b\u2028\xa0\ud800é日"))
    assert shown == (
        "a⏎\nb⇥\tc&lt;U+0000&gt;&lt;U+001B&gt;&lt;U+202E&gt;&lt;U+200B&gt;&lt;U+2028&gt;"
        "&lt;U+00A0&gt;&lt;U+D800&gt;é日"
    )
    # A lone surrogate can't be written as UTF-8; the page can.
    page(a_report(example={"prompt": "\ud800", "pieces": []})).encode()


def test_the_example_shows_who_wrote_what() -> None:
    html = page(a_report())
    assert '<span class="drafted">x</span><span class="written"> &lt;b&gt;</span>' in html
    assert "2 of 3 tokens came from the draft" in html
    assert "An example" not in page(an_ngram_report())


def test_absent_data_has_its_words() -> None:
    text = text_of(page(an_ngram_report()))
    for words in ("Nothing was drafted.", "No round was decoded.", "was not timed", "No ideal can"):
        assert words in text, words
    assert "None" not in text and "nan" not in text
    assert "the machine was busier" in text_of(page(a_report(efficiency=1.2)))


def test_all_differences_are_on_the_page() -> None:
    rows = re.findall(r'<td class="n">(\d+)</td><td class="n">7</td>', page(REPORTS["many"]()))
    assert rows == [str(i) for i in range(30)]


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_shows_each_figure_with_its_formula(name: str) -> None:
    report = REPORTS[name]()
    text = " ".join(text_of(page(report)).split())
    for row in figures.figures(report):
        line = " ".join(f"{row.name} {row.value} {row.interval} {row.formula}".split())
        assert line in text, line


@pytest.mark.parametrize("near_tie", [True, False])
def test_the_page_begins_with_the_verdict(near_tie: bool) -> None:
    report = a_report(divergences=[divergence("float32", near_tie=near_tie)])
    report["identical"] |= {"same": 3, "worst_margin": 0.25}
    found, html = figures.verdict(report), page(report)
    assert f'class="verdict {"near" if near_tie else "bad"}"' in html
    assert found.headline in text_of(html) and found.detail in text_of(html)
    assert ("but not the target&#x27;s output</h1>" in html) != near_tie


def test_the_headline_says_no_more_than_the_interval() -> None:
    assert "1.63\u00d7 the speed of plain decoding</h1>" in page(a_report())
    assert "no clear difference" in page(a_report(speedup_interval=[0.97, 1.71]))
    one_batch = page(REPORTS["one batch"]())
    assert "1.63\u00d7: no clear difference" in one_batch and "whisker:" not in one_batch
    assert "whisker: 95% interval over prompts" in page(a_report())
    assert "whisker: 95% interval over batches" in page(a_report(batch=2))
    assert "slower than plain" in page(a_report(speedup=0.9, speedup_interval=[0.8, 0.97]))
    assert ", LOSSY (typical:0.09,0.3)</h1>" in page(a_lossy_report())


def test_a_lossy_page_shows_what_answers_are_worth_beside_tau() -> None:
    card = '<p class="eyebrow">([^<]*)</p><p class="value">([^<]*)</p><p class="between">([^<]*)'
    cards = re.findall(card, page(REPORTS["lossy, with a task"]()))
    task = ("exact match, gsm8k", "25.0%", "(plain 50.0%, n = 4)")
    assert cards[1:3] == [("Block efficiency tau", "2.25", "[2.10, 2.40]"), task]
    assert ("agreement with plain", "0.812", "[0.700, 0.900]") in cards


def test_spec_bench_has_its_own_table() -> None:
    text = " ".join(text_of(page(REPORTS["Spec-Bench"]())).split())
    assert "as Spec-Bench groups them" in text and "mt_bench 3 2.31" in text
    assert "Skipped: 2 of 6 prompts" in text


# --------------------------------------------------------------------------------------- charts


def drawn(html: str) -> list[ET.Element]:
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", html, re.S)]


@pytest.mark.parametrize("name", REPORTS)
def test_charts_are_inside_their_frames_and_labelled(name: str) -> None:
    for picture in drawn(page(REPORTS[name]())):
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        assert picture.attrib["role"] == "img" and len(picture.attrib["aria-label"]) > 20
        axes = [text for text in picture.iter("text") if text.attrib["class"] == "axis"]
        assert axes and all(text.text for text in axes)
        for bar in picture.iter("rect"):
            x, y, wide, tall = (float(bar.attrib[k]) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + wide <= width and y + tall <= height
            assert wide >= 0 and tall >= 0
        for text in picture.iter("text"):
            place = text.attrib.get("transform")
            x, y = (
                map(float, re.findall(r"[-\d.]+", place)[:2])
                if place
                else (float(text.attrib["x"]), float(text.attrib["y"]))
            )
            assert 0 <= x <= width and 0 < y <= height


def test_columns_are_as_tall_as_their_values() -> None:
    by_position = drawn(page(a_report()))[0]
    bars = list(by_position.iter("rect"))
    tall = [float(bar.attrib["height"]) for bar in bars]
    expected = [0.75, 0.75, 0.5, 0.667]
    assert [round(t / tall[0] * 0.75, 2) for t in tall] == [round(v, 2) for v in expected]
    values = [t.text for t in by_position.iter("text") if t.attrib["class"] == "value"]
    assert values == ["0.75", "0.75", "0.50", "0.67"]
    assert [bar[0].text for bar in bars][1] == (
        "drafted position 1, of rounds that got there: 0.75"
    )
    shares = [t.text for t in drawn(page(a_report()))[1].iter("text") if t.get("class") == "value"]
    assert shares == ["25%", "30%", "45%"]


def test_lanes_are_as_long_as_their_values() -> None:
    speed, parts = drawn(page(a_report()))[2:]
    long = [float(bar.attrib["width"]) + 1 for bar in speed.iter("rect")]
    assert [round(w / long[0] * 1.632, 1) for w in long] == [1.6, 1.6, 1.6, 2.0]
    mark = next(line for line in speed.iter("line") if line.attrib["class"] == "mark")
    assert float(mark.attrib["x1"]) - 8 == pytest.approx(long[0] / 1.632, abs=0.2)
    # tau * t_plain above, K * t_draft and t_verify below.
    plain, draft, check = (float(bar.attrib["width"]) + 1 for bar in parts.iter("rect"))
    assert plain / (draft + check) == pytest.approx(a_report()["ideal_speedup"], abs=0.01)


@pytest.mark.parametrize("peak", [1e-6, 0.03, 0.5, 1.0, 1.01, 7, 99.9, 100, 12345])
def test_ticks_are_few_round_and_reach_the_peak(peak: float) -> None:
    steps = svg.ticks(peak)
    assert steps[0] == 0 and 3 <= len(steps) <= 7
    assert steps[-1] >= peak * (1 - 1e-9) and steps[-2] < peak
    assert len({round((b - a) / peak, 9) for a, b in pairwise(steps)}) == 1


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
