"""One page of all that ran: `python -m bench.report [FOLDER]` writes report.html beside the results.

The page stands alone: pictures are inside it. It holds every benchmark of the suite whose JSON lies in the folder.
"""

import base64
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.common import RESULTS, texts

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>mamba-jax benchmarks</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }
h2 { margin-top: 2.5em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
table { font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
.text { text-align: left; }
img { max-width: 100%; }
.facts { color: #666; font-size: 13px; }
</style>
</head>
<body>
<h1>mamba-jax benchmarks</h1>
<p>Our figures beside those of the papers; below each table stands what made the papers' and where the two cannot be
compared.</p>
<ul>
{% for report in reports %}<li><a href="#{{ report.name }}">{{ report.title }}</a></li>
{% endfor %}</ul>
{% for report in reports %}
<h2 id="{{ report.name }}">{{ report.title }}</h2>
<p class="facts">{{ report.device }}, {{ report.date }}, {{ report.setting.dtype }} weights, Python {{ report.python }},
{% for name, version in report.versions.items() %}{{ name }} {{ version }}, {% endfor %}{{ report.seconds }} s:
<code>{{ report.command }}</code></p>
{% for section in report.sections %}
<h3>{{ section.title }}</h3>
<table>
<tr>{% for column in section.columns %}<th class="{{ column.align }}">{{ column.name }}</th>{% endfor %}</tr>
{% for row in section.cells %}
<tr>{% for cell in row %}<td class="{{ section.columns[loop.index0].align }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
<p>{{ section.settings }}</p>
{% if section.finding %}<p><b>{{ section.finding }}</b></p>{% endif %}
{% endfor %}
{% if report.picture %}<img alt="{{ report.title }}" src="data:image/png;base64,{{ report.picture }}">{% endif %}
{% endfor %}
</body>
</html>
"""


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """What lies in a folder, as the template takes it."""
    reports = []
    for file in sorted(folder.glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(report, dict) or "sections" not in report:
            continue  # of another kind
        for section in report["sections"]:
            first = section["rows"][0]
            aligned = {name: "text" if isinstance(value, str) else "number" for name, value in first.items()}
            section["columns"] = [{"name": name, "align": align} for name, align in aligned.items()]
            columns = [texts([row[name] for row in section["rows"]]) for name in first]
            section["cells"] = list(zip(*columns, strict=True))
        picture = file.with_suffix(".png")
        report["picture"] = base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else None
        reports.append(report)
    return reports


def write_report(folder: Path) -> Path:
    """Write report.html into a folder of results.

    Raises:
        ValueError: if there is no result in it.
    """
    import jinja2

    reports = read_reports(folder)
    if not reports:
        raise ValueError(f"folder: got {folder}, wanted one with results of `python -m bench.all`")
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE).render(reports=reports)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def main(folder: Annotated[Path, typer.Argument(help="Of results.")] = RESULTS) -> None:
    """Write one page of all that ran."""
    typer.echo(f"wrote {write_report(folder)}")


if __name__ == "__main__":
    typer.run(main)
