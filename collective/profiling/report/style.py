"""Holds the style sheet of a page: light and dark, for screens from a phone to a wide monitor.

It has no ampersand and no less-than sign, so that the page is XML, too.
"""

COLOURS = {
    # name: (light, dark)
    "between-runs": ("#b9c0c9", "#5b636e"),
    "input": ("#7d5bb5", "#a184d6"),
    "agreement": ("#d8c25a", "#c9b458"),
    "keys": ("#f0b429", "#e3aa2a"),
    "rows": ("#ec8b2e", "#e0832b"),
    "gradients": ("#d65f2c", "#d2622f"),
    "dense-gradients": ("#a8452a", "#b45a3c"),
    "other": ("#9c7a5f", "#9c7a5f"),
    "lookup": ("#2f78bd", "#4f97d8"),
    "dense": ("#2a9d94", "#3fb3a9"),
    "optimizer": ("#58a64a", "#6dbb5f"),
    "waiting-for-others": ("#c8324f", "#e0526c"),
    "rest-of-the-run": ("#8d96a1", "#7d8691"),
}
LINES = (
    ("#2f78bd", "#4f97d8"),
    ("#ec8b2e", "#e0832b"),
    ("#2a9d94", "#3fb3a9"),
    ("#c8324f", "#e0526c"),
    ("#7d5bb5", "#a184d6"),
    ("#58a64a", "#6dbb5f"),
    ("#a8452a", "#cf7354"),
    ("#d0a400", "#e3c13e"),
    ("#1d4f7c", "#8fc1ec"),
    ("#b0578d", "#d78bb8"),
    ("#8d96a1", "#7d8691"),
)

SHEET = """
:root { color-scheme: light dark; --back: #ffffff; --panel: #f6f7f9; --text: #1b1f24;
  --soft: #59636e; --line: #d9dee4; --accent: #2f78bd; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .35rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.1rem 0 .35rem; overflow-wrap: anywhere; }
p { margin: .3rem 0 .7rem; max-width: 60rem; }
.soft { color: var(--soft); }
.note { background: var(--panel); border-left: 3px solid var(--accent); padding: .5rem .8rem;
  margin: .8rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; padding: 0; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: .55rem .75rem; }
.tiles dt { color: var(--soft); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.findings { padding-left: 1.2rem; max-width: 60rem; }
.findings li { margin: .3rem 0; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 2rem; }
.bar { display: grid; grid-template-columns: 6.5rem minmax(0, 1fr) 5.5rem; gap: .6rem;
  align-items: center; margin: .2rem 0; font-size: .85rem; }
.bar .label { overflow-wrap: anywhere; line-height: 1.2; }
.bar .value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar .track { display: flex; height: 1.35rem; background: var(--panel); border-radius: 3px;
  overflow: hidden; }
.bar.mean { font-weight: 600; margin-bottom: .5rem; }
.bar.mean .track { height: 1.8rem; }
.bar.mean .part { line-height: 1.8rem; }
.beyond .track { -webkit-mask-image: linear-gradient(90deg, #000 80%, transparent);
  mask-image: linear-gradient(90deg, #000 80%, transparent); }
.by-table { container: tables / inline-size; }
.by-table .bar { grid-template-columns: minmax(8rem, 26rem) minmax(0, 1fr) 5.5rem; }
.part { container: part / inline-size; display: block; height: 100%; overflow: hidden;
  color: #ffffff; font-size: .72rem; line-height: 1.35rem; text-align: center; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.of-agreement, .of-keys, .of-rows, .of-between-runs { color: #1b1f24; }
.of-waiting-for-others { background-image: repeating-linear-gradient(135deg,
  rgba(255, 255, 255, .28) 0 3px, transparent 3px 8px); }
.of-waiting-for-others span { background: rgba(120, 10, 35, .75); padding: 0 .25rem;
  border-radius: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0;
  margin: .5rem 0; font-size: .82rem; }
.legend li { display: flex; align-items: baseline; overflow-wrap: anywhere; min-width: 0; }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin-right: .4rem; vertical-align: -.08rem; flex: none; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; padding: .28rem .7rem .28rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td:first-child { overflow-wrap: anywhere; min-width: 8rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { white-space: normal; }
.wordy td:nth-child(2) { color: var(--soft); min-width: 14rem; }
.column-chart { max-width: 60rem; }
.columns { position: relative; display: flex; align-items: flex-end; height: 7rem; gap: 1px;
  border-bottom: 1px solid var(--soft); }
.columns span { flex: 1 1 0; height: 100%; display: flex; align-items: flex-end; max-width: 4rem;
  min-width: 0; }
.columns span span { background: var(--accent); height: auto; min-height: 1px; max-width: none; }
.columns i { position: absolute; left: 0; right: 0; border-top: 2px dashed var(--text);
  opacity: .6; }
.each { display: flex; gap: 1px; color: var(--soft); font-size: .78rem; }
.each span { flex: 1 1 0; max-width: 4rem; min-width: 0; text-align: center; }
.column-chart.few { max-width: 24rem; }
.few .columns span, .few .each span { max-width: none; }
.few .columns span span { max-width: none; }
.ends { display: flex; justify-content: space-between; color: var(--soft); font-size: .78rem; }
.line-chart { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: .2rem .5rem;
  max-width: 60rem; margin: .4rem 0; }
.line-chart .heights { display: flex; flex-direction: column; justify-content: space-between;
  text-align: right; color: var(--soft); font-size: .78rem; line-height: 1; }
.line-chart .plot { height: 10rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--soft); background: linear-gradient(var(--line), var(--line))
  0 50% / 100% 1px no-repeat; }
.line-chart .ends { grid-column: 2; }
svg { width: 100%; height: 100%; display: block; overflow: visible; }
polyline { fill: none; stroke-width: 2px; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
code { font-size: .92em; background: var(--panel); padding: .05rem .3rem; border-radius: 3px; }
@media (min-width: 64rem) {
  .pair.two { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
}
@container part (max-width: 3.4rem) {
  .part span { display: none; }
}
@container tables (max-width: 44rem) {
  .by-table .bar { grid-template-columns: minmax(0, 1fr) 4.6rem; gap: 0 .4rem;
    margin: .45rem 0; }
  .by-table .bar .label { grid-column: 1 / 3; }
}
@media (max-width: 40rem) {
  main { padding: 1rem .8rem 3rem; }
  .bar { grid-template-columns: 4.2rem minmax(0, 1fr) 4.6rem; gap: .4rem; font-size: .8rem; }
  .wordy th:nth-child(2), .wordy td:nth-child(2) { display: none; }
}
"""
DARK = """
:root { --back: #14171b; --panel: #1e2329; --text: #e7eaee; --soft: #9aa5b1; --line: #333b44;
  --accent: #4f97d8; }
.of-between-runs { color: #ffffff; }
"""


def sheet() -> str:
    """Returns the whole style sheet."""
    themes = []
    for theme in (0, 1):
        rules = [
            f".of-{name} {{ background-color: {both[theme]}; }}" for name, both in COLOURS.items()
        ]
        for i, both in enumerate(LINES):
            rules.append(f"polyline.line-{i} {{ stroke: {both[theme]}; }}")
            rules.append(f".swatch.line-{i} {{ background-color: {both[theme]}; }}")
        themes.append("\n".join(rules))
    light, dark = themes
    return f"{SHEET}{light}\n@media (prefers-color-scheme: dark) {{{DARK}{dark}\n}}\n"
