"""The pages of the HTTP service: plain HTML without scripts or external files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import chain
from typing import Any

from delaylevel import __version__

from .reports import (
    ActionReport,
    ActionTopic,
    DuePeriod,
    PartitionLine,
    ProbeCheck,
    ProblemLine,
    StatusSection,
)

_COMMAND = re.compile(r"`([^`]+)`")
#: Time after which a browser loads the page again, in s.
REFRESH_S = 5
# Shorter times are the age of the statistics.
_OVERDUE_MS = 2_000

_STYLE = """
:root { color-scheme: light dark; --line: #d8dde3; --soft: #667085; --bar: #2f6fde;
  --bad: #c4320a; --good: #12805c; --back: #ffffff; --page: #f4f6f8; --text: #1d2433; }
@media (prefers-color-scheme: dark) { :root { --line: #343b47; --soft: #98a2b3; --bar: #6c9dff;
  --bad: #ff8a65; --good: #4cc38a; --back: #1b2028; --page: #12161c; --text: #e6e9ef; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 12px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 960px; margin: 0 auto; }
h1 { font-size: 20px; margin: 4px 0 12px; }
h2 { font-size: 17px; margin: 0 0 8px; overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 16px 0 6px; color: var(--soft); font-weight: 600; }
section { background: var(--back); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px; margin: 0 0 14px; }
.badge { display: inline-block; padding: 1px 9px; border-radius: 10px; font-size: 13px;
  color: var(--back); background: var(--good); vertical-align: middle; }
.badge.bad { background: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: 0; padding: 0; list-style: none; }
li.problem { border-left: 3px solid var(--bad); padding: 2px 0 2px 10px; margin: 8px 0 0; }
li.problem:first-child { margin-top: 0; }
li.problem span { display: block; color: var(--soft); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wrap { white-space: normal; overflow-wrap: break-word; min-width: 9em; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); } .badge.bad { color: var(--back); } .soft { color: var(--soft); }
.bars { max-width: 480px; } .bars th, .bars td { border: 0; } .bars td:last-child { width: 99%; }
.bar { height: 14px; min-width: 2px; border-radius: 2px; background: var(--bar); }
.bar.late { background: var(--bad); }
code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
form { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; }
label, form span { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center;
  max-width: 100%; }
input, select, button { font: inherit; font-size: 16px; padding: 6px 10px; max-width: 100%;
  color: inherit; background: var(--page); border: 1px solid var(--line); border-radius: 6px; }
button { background: var(--bar); border-color: var(--bar); color: var(--back); cursor: pointer; }
button[formaction$="cancel"], button[formaction$="pause"] { background: var(--bad);
  border-color: var(--bad); }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
.message { border-left: 3px solid var(--line); padding: 0 0 0 10px; margin: 12px 0 0; }
.message form { margin: 8px 0 0; }
footer { color: var(--soft); font-size: 13px; }
footer a { color: inherit; }
"""


def status_page(
    sections: Sequence[StatusSection], checks: Sequence[ProbeCheck], *, can_act: bool = False
) -> str:
    """Return the status page; sections with the same title become one."""
    ready = all(check.ok for check in checks)
    kind, word = ("badge", "ready") if ready else ("badge bad", "not ready")
    body = [f'<h1>delaylevel <span class="{kind}">{word}</span></h1>']
    failed = [
        ProblemLine(f"Not ready: {check.name}", check.text) for check in checks if not check.ok
    ]
    if failed:
        body.append(f"<section>{''.join(_problems(failed))}</section>")
    for title in dict.fromkeys(each.title for each in sections):
        body.append(_section(title, [each for each in sections if each.title == title]))
    actions = '<a href="/actions">actions</a> · ' if can_act else ""
    body.append(
        f"<footer>delaylevel {escape(__version__)} · refreshed every {REFRESH_S} s · {actions}"
        '<a href="/metrics">metrics</a> · <a href="/readyz">readiness</a> · '
        '<a href="/healthz">health</a></footer>'
    )
    return _document(word, body, f'<meta http-equiv="refresh" content="{REFRESH_S}">')


def action_page(
    topics: Sequence[ActionTopic], report: ActionReport | None = None, topic: str = ""
) -> str:
    """Return the page of actions, not refreshed; the messages of a report are of the topic."""
    body = ['<h1>delaylevel <span class="badge">actions</span></h1>']
    if report is not None:
        kind = "" if report.status == 200 else ' class="bad"'
        body.append(f'<section role="status"><p{kind}><b>{escape(report.text)}</b></p>')
        body += [_message(row, topic) for row in report.rows]
        body.append("</section>")
    for each in topics:
        body += _action_forms(each)
    if not topics:
        body.append("<section>No level topic with the window `tracker` is served here.</section>")
    body.append('<footer><a href="/">status</a> · <a href="/actions">actions</a></footer>')
    return _document("actions", body)


def _document(title: str, body: Iterable[str], head: str = "") -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{head}<link rel="icon" href="data:,"><title>delaylevel: {title}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _action_forms(topic: ActionTopic) -> Iterator[str]:
    """Yield the forms of one level topic."""
    paused = [
        f"{'all targets' if name == '*' else escape(_short(name))} since {_instant(since)}"
        for name, since in topic.paused.items()
    ]
    state = f'<p class="bad">Paused: {"; ".join(paused)}</p>' if paused else ""
    yield f"<section><h2>{escape(topic.topic)}</h2><h3>Deliveries</h3>{state}"
    yield _form_start(topic)
    yield '<label>Release what waits over <input name="spread" placeholder="10m" size="5"></label>'
    yield _buttons(("resume", "Resume"), ("pause", "Pause"))
    yield "</form><h3>One message</h3>"
    yield _form_start(topic)
    for name, label in (("id", "ID"), ("key", "or key")):
        yield f'<label>{label} <input name="{name}" autocomplete="off"></label>'
    yield _buttons(("find", "Find"), ("cancel", "Cancel"), ("fire", "Fire now"))
    yield "</form></section>"


def _form_start(topic: ActionTopic) -> str:
    options = "".join(
        f'<option value="{escape(name)}">{escape(_short(name))}</option>' for name in topic.targets
    )
    return (
        '<form method="post" action="/actions/find">'
        f'<input type="hidden" name="topic" value="{escape(topic.topic)}">'
        '<label>Target <select name="target"><option value="">all targets</option>'
        f"{options}</select></label>"
    )


def _buttons(*actions: tuple[str, str]) -> str:
    found = (
        f'<button formaction="/actions/{action}">{label}</button>' for action, label in actions
    )
    return f"<span>{''.join(found)}</span>"


def _message(row: Mapping[str, Any], topic: str) -> str:
    """Return one message of an outcome, with buttons if it waits."""
    facts = {
        name.removesuffix("_ms").replace("_", " "): _instant(value)
        if name.endswith("_ms")
        else _short(str(value))
        for name, value in row.items()
        if value is not None and name != "receipt"
    }
    buttons = ""
    if "receipt" in row and "outcome" not in row:
        buttons = (
            '<form method="post" action="/actions/cancel">'
            f'<input type="hidden" name="topic" value="{escape(topic)}">'
            f'<input type="hidden" name="receipt" value="{escape(row["receipt"])}">'
            f"{_buttons(('cancel', 'Cancel'), ('fire', 'Fire now'))}</form>"
        )
    return f'<div class="message">{"".join(_pairs(facts))}{buttons}</div>'


def _short(topic: str) -> str:
    return topic.removeprefix("persistent://public/default/")


def _instant(ms: int) -> str:
    found = datetime.fromtimestamp(ms / 1000, timezone.utc)
    return found.strftime("%Y-%m-%d %H:%M:%S UTC")


def _section(title: str, parts: Sequence[StatusSection]) -> str:
    """Return the section of a level topic, of which each reporter of the process has a part."""
    facts = {name: value for part in parts for name, value in part.facts.items()}
    return "".join(
        (
            f"<section><h2>{escape(title)}</h2>",
            *_problems([line for part in parts for line in part.problems]),
            *_under("Due in the window", (_bars(part.periods) for part in parts)),
            *_under("Parked in levels (entries)", (_bars(part.parked) for part in parts)),
            *_under("Window partitions", (_partitions(part.partitions) for part in parts)),
            *_under("Held since the takeover", (_held(part.held) for part in parts)),
            *_under("Facts", [_pairs(facts)]),
            "</section>",
        )
    )


def _under(title: str, contents: Iterable[Iterable[str]]) -> Iterator[str]:
    found = "".join(chain.from_iterable(contents))
    if found:
        yield f"<h3>{escape(title)}</h3>{found}"


def _problems(problems: Sequence[ProblemLine]) -> Iterator[str]:
    if problems:
        yield "<ul>"
        for problem, remedy in problems:
            text = _COMMAND.sub(r"<code>\1</code>", escape(remedy))
            yield f'<li class="problem">{escape(problem)}<span>{text}</span></li>'
        yield "</ul>"


def _bars(periods: Sequence[DuePeriod]) -> Iterator[str]:
    """Yield a table with a horizontal bar for each period."""
    if periods:
        most = max(1, *(period.messages for period in periods))
        yield '<table class="bars">'
        for label, messages, late in periods:
            kind = "bar late" if late else "bar"
            bar = f'<div class="{kind}" style="width: {100 * messages / most:.1f}%"></div>'
            yield (
                f'<tr><th>{escape(label)}</th><td class="number">{messages:,}</td>'
                f"<td>{bar if messages else ''}</td></tr>"
            )
        yield "</table>"


def _partitions(partitions: Sequence[PartitionLine]) -> Iterator[str]:
    if not partitions:
        return
    yield '<div class="scroll"><table><tr><th class="number">Nr.</th><th>State</th>'
    yield '<th class="number">Waiting</th><th>Owner</th></tr>'
    for line in partitions:
        state = line.state or ("elsewhere" if line.owner else "no owner")
        bad = ' class="bad"' if state not in ("releasing", "elsewhere") else ""
        pending = f"{line.pending:,}" if line.here else ""
        if line.overdue_ms >= _OVERDUE_MS:
            state, bad = f"{state}, {line.overdue_ms // 1_000:,} s overdue", ' class="bad"'
        here = ' <span class="soft">(this process)</span>' if line.here else ""
        yield (
            f'<tr><td class="number">{line.partition}</td><td{bad}>{escape(state)}</td>'
            f'<td class="number">{pending}</td>'
            f'<td class="wrap">{escape(line.owner)}{here}</td></tr>'
        )
    yield "</table></div>"


def _held(counts: Mapping[str, int] | None) -> Iterator[str]:
    if counts:
        yield '<div class="scroll"><table><tr><th class="number">Messages</th><th>Target</th></tr>'
        for target, count in counts.items():
            number = f'<td class="number">{count:,}</td>'
            yield f'<tr>{number}<td class="wrap">{escape(target)}</td></tr>'
        yield "</table></div>"


def _pairs(facts: Mapping[str, str]) -> Iterator[str]:
    if facts:
        yield "<dl>"
        for name, value in facts.items():
            yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        yield "</dl>"
