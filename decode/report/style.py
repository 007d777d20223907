"""The style sheet of the HTML report: light and dark, no external fonts or pictures.

Text has a contrast of at least 4.5 to 1 on what it stands on, and bars of 3 to 1, in both schemes;
the colours of a chart differ in lightness too, not in hue alone.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e2e5ea; --ink: #16191d; --soft: #59616d;
  --a: #123f97; --b: #5b8fe8; --c: #0f766e; --d: #8a94a1; --on-a: #ffffff; --on-b: #0b2350;
  --on-c: #ffffff; --on-d: #16191d;
  --good: #0b6b3a; --good-bg: #e3f5ea; --near: #7a5300; --near-bg: #fdf3d8;
  --bad: #a01c1c; --bad-bg: #fde7e7; --note: #46505c; --note-bg: #eceff3;
  --drafted: #d5e6ff; --drafted-ink: #0b2350; --target-ink: #7a3b00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101316; --card: #181c21; --line: #2c323a; --ink: #e9ecf0; --soft: #a2abb7;
    --a: #8db8ff; --b: #3f74cf; --c: #3fc4b6; --d: #6a7480; --on-a: #07152e; --on-b: #ffffff;
    --on-c: #04211e; --on-d: #ffffff;
    --good: #7fe0a7; --good-bg: #12301f; --near: #f3cf7a; --near-bg: #33290f;
    --bad: #ff9d9d; --bad-bg: #3d1717; --note: #c3cad3; --note-bg: #242a31;
    --drafted: #1f3f73; --drafted-ink: #eaf2ff; --target-ink: #ffb56b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 4px 0 6px; }
h2 { font-size: 17px; letter-spacing: -0.005em; margin: 0 0 4px; }
p { margin: 0; }
code, .mono {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.eyebrow { color: var(--soft); font-size: 13px; font-weight: 600; letter-spacing: 0.02em; }
.lead { color: var(--soft); font-size: 16px; overflow-wrap: anywhere; }
.lead b { color: var(--ink); font-weight: 600; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 14px 0 0; padding: 0; list-style: none; }
.chips li {
  background: var(--card); border: 1px solid var(--line); border-radius: 999px; padding: 2px 11px;
  font-size: 13px; color: var(--soft);
}
.chips b { color: var(--ink); font-weight: 600; }
.verdict {
  display: flex; gap: 14px; align-items: flex-start; border-radius: 12px; padding: 14px 18px;
  margin: 22px 0;
}
.verdict .sign { font-size: 20px; line-height: 1.3; font-weight: 700; }
.verdict strong { display: block; font-size: 16px; }
.verdict p { color: var(--ink); }
.good { background: var(--good-bg); } .good .sign, .good strong { color: var(--good); }
.near { background: var(--near-bg); } .near .sign, .near strong { color: var(--near); }
.bad { background: var(--bad-bg); } .bad .sign, .bad strong { color: var(--bad); }
.note { background: var(--note-bg); } .note .sign, .note strong { color: var(--note); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px;
}
.card, section, .charts figure {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
}
.card .value { font-size: 30px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.25; }
.card .between { color: var(--soft); font-size: 13px; min-height: 1.5em; }
.card .formula { color: var(--soft); font-size: 12.5px; line-height: 1.4; margin-top: 6px; }
section { margin-top: 14px; overflow-x: auto; }
.charts { margin-top: 14px; }
.charts figure { margin: 0; overflow-x: auto; }
figcaption p, .caption { color: var(--soft); font-size: 13px; }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 2px; font-size: 13px;
  color: var(--soft);
}
.legend i {
  display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
}
svg { display: block; width: 100%; min-width: 380px; height: auto; margin-top: 6px; }
svg text {
  font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink);
}
svg .tick, svg .axis { fill: var(--soft); }
svg .name, svg .value { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .value { font-weight: 600; } svg .small { font-size: 10.5px; font-weight: 500; }
svg .grid { stroke: var(--line); } svg .base { stroke: var(--soft); }
svg .mark { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .casing { stroke: var(--card); stroke-width: 4; fill: none; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.a { fill: var(--a); background: var(--a); } .b { fill: var(--b); background: var(--b); }
.c { fill: var(--c); background: var(--c); } .d { fill: var(--d); background: var(--d); }
svg text.on-a { fill: var(--on-a); } svg text.on-b { fill: var(--on-b); }
svg text.on-c { fill: var(--on-c); } svg text.on-d { fill: var(--on-d); }
.example {
  margin: 10px 0 0; padding: 14px 16px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--page); font-size: 13px; line-height: 1.75; white-space: pre-wrap;
  overflow-wrap: anywhere; tab-size: 4;
}
.example .prompt { color: var(--soft); }
.drafted, .written {
  border-radius: 3px; -webkit-box-decoration-break: clone; box-decoration-break: clone;
}
.drafted {
  background: var(--drafted); color: var(--drafted-ink); box-shadow: inset -1px 0 0 var(--card);
}
.written { color: var(--target-ink); border-bottom: 1.5px solid currentColor; }
.sign-of-space { opacity: 0.6; font-weight: 400; }
.code-point { font-size: 11px; border: 1px solid currentColor; border-radius: 3px; }
table { border-collapse: collapse; width: 100%; margin-top: 8px; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td, tr:last-child > th { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; padding-right: 22px; }
td.v { white-space: nowrap; font-weight: 600; } td.v.long { white-space: normal; max-width: 320px; }
td.v span { color: var(--soft); font-weight: 400; }
td.f { color: var(--soft); font-size: 13px; } td.k { white-space: nowrap; }
td.w { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 24px; }
  td.k { white-space: normal; }
}
@media print {
  body { background: none; }
  main { max-width: none; padding: 0; }
  .card, section, figure { break-inside: avoid; }
}
"""
