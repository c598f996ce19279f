"""The planner's benchmark prints what the library computes, beside the paper's figures."""

import json

from bench.fusion import main


def test_figures_stand_beside_the_papers_and_agree(tmp_path, capsys):
    main(seeds=2, out=tmp_path / "report.json", plot=None)
    report = json.loads((tmp_path / "report.json").read_text())
    agreed = {
        "table_11": (("depth", "ms", "B/token", "proxy"), 16),
        "weight_grid": (("ms",), 4),
        "table_33": (("static", "guided"), 22),
    }
    for name, (columns, count) in agreed.items():
        pairs = [(row[c], row[f"{c} paper"]) for row in report[name]["rows"] for c in columns]
        printed = [(ours, paper) for ours, paper in pairs if paper is not None]
        assert len(printed) == count
        assert all(ours == paper for ours, paper in printed)
    facts = [(row["ours"], row["paper"]) for row in report["theorem"]["rows"] if row["paper"] is not None]
    assert len(facts) == 5
    assert all(ours == paper for ours, paper in facts)
    shown = capsys.readouterr().out
    assert all(section["title"] in shown for section in report.values() if "rows" in section)
