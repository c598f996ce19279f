"""LongBench: reading samples, prompts, metrics, and runs that are killed, changed, or split over processes."""

import dataclasses
import json
import sys

import pytest
from typer.testing import CliRunner

import mamba_jax
from mamba_jax import cli
from mamba_jax.longbench import (
    cut_middle,
    find_tasks,
    harness,
    load_samples,
    load_templates,
    merge,
    run,
    score_prediction,
)
from mamba_jax.longbench.metrics import exact_match, rouge_l, token_f1, words
from mamba_jax.records import read_lines
from mamba_jax.scheduler.policies import Decision
from tests import small_tokenizers
from tests.tiny import tiny_params

TEMPLATES = {
    "qasper": "Read the text.\n\n{context}\n\nQuestion: {input}",
    "gov_report": "Sum up.\n\n{context}\n\nSummary:",
}
LENGTHS = {"qasper": 6, "gov_report": 9}
needs_rouge = pytest.mark.usefixtures("rouge")


@pytest.fixture
def rouge():
    pytest.importorskip("rouge", reason="pip install 'mamba-jax[eval]'")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "dataset2prompt.json").write_text(json.dumps(TEMPLATES))
    (folder / "dataset2maxlen.json").write_text(json.dumps(LENGTHS))
    night = "It was a dark night and the wind was high. "
    rows = [
        {
            "context": night * (i + 1),
            "input": f"What is {chr(97 + i)}",
            "answers": ["night", f"the wind {i}"],
            "_id": f"q{i}",
        }
        for i in range(5)
    ]
    write_lines(folder / "qasper.jsonl", rows)
    write_lines(folder / "gov_report.jsonl", [{"context": night * 3, "input": "", "answers": [night]}] * 2)
    write_lines(folder / "other.jsonl", rows)  # no template
    return folder


@pytest.fixture(scope="module")
def params():
    return tiny_params("mamba2", vocab_size=320)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizers.byte_level()


@pytest.fixture
def start(params, data, tokenizer, rouge):
    """`run` on the small data, two samples at a time."""
    return lambda out, **options: run(params, data, out, **{"tokenizer": tokenizer, "batch": 2, **options})


# Samples


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"context": "c", "input": "i", "answers": ["a", "b"]}, ("c", "i", ("a", "b"))),
        ({"article": "c", "question": "i", "label": "a"}, ("c", "i", ("a",))),
        ({"documents": ["c", "d"], "query": "i", "outputs": [7]}, ("c\n\nd", "i", ("7",))),
        ({"metadata": {"text": "c", "prompt": "i", "target": "a"}}, ("c", "i", ("a",))),
        ({"context": "c", "input": None, "answers": "a", "content": "no"}, ("c", "", ("a",))),
    ],
)
def test_rows_may_call_their_parts_by_other_names(tmp_path, row, wanted):
    write_lines(tmp_path / "t.jsonl", [row])
    (sample,) = load_samples(tmp_path / "t.jsonl")
    assert (sample.context, sample.input, sample.answers) == wanted
    assert (sample.index, sample.id) == (0, "0")


def test_offset_and_number_of_samples(data):
    path = data / "qasper.jsonl"
    assert [sample.id for sample in load_samples(path, offset=1, max_samples=2)] == ["q1", "q2"]
    assert [sample.index for sample in load_samples(path, offset=3)] == [3, 4]
    for options, message in (
        ({"offset": -1}, "offset: got -1"),
        ({"max_samples": 0}, "max_samples: got 0"),
        ({"offset": 5}, "no sample from number 5 on"),
    ):
        with pytest.raises(ValueError, match=message):
            load_samples(path, **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: got no JSON"),
        ("[]", "line 2: got \\[\\], wanted a JSON object"),
        ('{"context": "\\ud800", "answers": "a"}', "line 2: got no JSON in UTF-8"),
        ('{"context": "c", "answers": "a", "length": NaN}', "line 2: got no JSON in UTF-8"),
        ("\udcff", "line 2: got no JSON in UTF-8"),
        ('{"context": "c"}', "line 2: got no answers, wanted one of answers, answer"),
        ('{"answers": "a"}', "line 2: got no context, wanted one of context, article"),
        ('{"context": "c", "answers": [{}]}', "line 2: answers: got"),
        ('{"context": 3, "answers": "a"}', "line 2: context: got 3"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    text = '{"context": "c", "answers": "a"}\n' + line + "\n"
    (tmp_path / "t.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "t.jsonl")


def test_layouts_of_folders(tmp_path):
    for name in ("a.jsonl", "data/b.jsonl", "c/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(find_tasks(tmp_path)) == ["a", "b", "c"]


# Prompts


def test_a_prompt_holds_text_with_braces(data):
    sample = load_samples(data / "qasper.jsonl")[0]
    sample = type(sample)(0, "0", "{input} {x} {}", "{context}?", ("a",))
    rendered = load_templates(data)["qasper"].render(sample)
    assert rendered == "Read the text.\n\n{input} {x} {}\n\nQuestion: {context}?"


@pytest.mark.parametrize(
    ("texts", "lengths", "message"),
    [
        ({"t": "{context} {other}"}, {"t": 1}, r"t: got the fields \['other'\]"),
        ({"t": "{context"}, {"t": 1}, "does not parse"),
        ({"t": 3}, {"t": 1}, "t: got 3, wanted a text"),
        ({"t": "{context}"}, {}, "dataset2maxlen.json: t: got None"),
        ({"t": "{context}"}, None, "has no dataset2maxlen.json"),
    ],
)
def test_bad_templates_are_named(tmp_path, texts, lengths, message):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(texts))
    if lengths is not None:
        (tmp_path / "dataset2maxlen.json").write_text(json.dumps(lengths))
    with pytest.raises(ValueError, match=message):
        load_templates(tmp_path)


def test_a_long_prompt_loses_its_middle_and_keeps_the_question(tokenizer):
    prompt = "Answer. " + "It was a dark night. " * 50 + "Where are you going?"
    whole = tokenizer(prompt)["input_ids"]
    assert cut_middle(tokenizer, prompt, None) == (whole, 0)
    assert cut_middle(tokenizer, prompt, len(whole)) == (whole, 0)
    ids, cut = cut_middle(tokenizer, prompt, 31)
    assert cut == len(whole) - 30
    text = tokenizer.decode(ids)
    assert text.startswith("Answer. It was")
    assert text.endswith("Where are you going?")
    assert abs(len(ids) - 30) <= 2


# Metrics


def test_words_are_lower_cased_then_lose_punctuation_then_articles():
    assert words("The A.N. Other's, an apple--pie") == ["others", "applepie"]  # A.N. became an article


def test_f1_counts_words_as_often_as_they_occur():
    assert token_f1("cat cat dog", "The cat, a dog bird bird") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert token_f1("", "x") == token_f1("x", "") == token_f1("the", "a") == 0
    assert (exact_match("The Cat!", "cat"), exact_match("cats", "cat")) == (1, 0)


@needs_rouge
def test_rouge_l_is_of_distinct_words_and_united_over_sentences():
    # m = 4 words of the answer, n = 3 of the prediction; common in order: a c, then d.
    assert rouge_l("a c. d", "a b c. d") == pytest.approx(2 * (3 / 4) * 1 / (3 / 4 + 1), abs=1e-6)
    assert rouge_l("A", "a") == 0  # as they are
    assert rouge_l("a a a a", "a b") == pytest.approx(2 * 0.5 / 1.5, abs=1e-6)
    assert rouge_l("", "a") == rouge_l("...", "a") == rouge_l("a", "") == 0


@needs_rouge
def test_the_best_answer_counts_and_few_shot_tasks_end_with_the_line():
    scores = score_prediction("qasper", "dark night", ["no", "a dark, dark night", "dark night"])
    assert (scores["exact_match"], scores["f1"]) == (1, 1)
    assert scores["rouge_l"] == pytest.approx(1, abs=1e-6)
    assert score_prediction("triviaqa", "\n\nParis\nQuestion: x", ["paris"])["exact_match"] == 1
    assert score_prediction("qasper", "\n\nParis\nQuestion: x", ["paris"])["exact_match"] == 0
    with pytest.raises(ValueError, match="answers: got none"):
        score_prediction("qasper", "x", [])


# Runs


def read(folder):
    """Records of all tasks without what differs from run to run."""
    varying = ("latency_s", "tokens_per_s", "batch", "decisions")
    lines = {path.name: map(json.loads, path.read_text().splitlines()) for path in sorted(folder.glob("*.jsonl"))}
    return {
        name: [{key: value for key, value in line.items() if key not in varying} for line in records]
        for name, records in lines.items()
    }


def test_a_run_leaves_predictions_and_the_means_over_samples(start, params, tokenizer, data, tmp_path):
    summary = start(tmp_path, name="tiny", max_length=60)
    found = read(tmp_path)
    assert [(name, len(lines)) for name, lines in found.items()] == [("gov_report.jsonl", 2), ("qasper.jsonl", 5)]
    lines = found["qasper.jsonl"]
    assert [line["index"] for line in lines] == list(range(5))
    for line, sample in zip(lines, load_samples(data / "qasper.jsonl"), strict=True):
        ids, cut = cut_middle(tokenizer, load_templates(data)["qasper"].render(sample), 60)
        alone = mamba_jax.generate(params, ids, max_new_tokens=6, tokenizer=tokenizer)
        assert (line["pred"], line["new_tokens"]) == (alone.text, len(alone.tokens))
        assert (line["prompt_tokens"], line["cut_tokens"], line["entropy"]) == (len(ids), cut, None)
        assert line["answers"] == list(sample.answers)
    assert len({line["pred"] for line in lines}) > 1
    assert summary.tasks["qasper"].f1 == pytest.approx(20 * sum(line["scores"]["f1"] for line in lines))
    assert (summary.tasks["qasper"].metric, summary.tasks["gov_report"].metric) == ("f1", "rouge_l")
    assert summary.tasks["qasper"].score == summary.tasks["qasper"].f1
    assert summary.all.samples == 7
    weighted = (5 * summary.tasks["qasper"].rouge_l + 2 * summary.tasks["gov_report"].rouge_l) / 7
    assert summary.all.rouge_l == pytest.approx(weighted)
    assert summary.all.tokens_per_s > 0
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["tasks"]["qasper"]["samples"] == 5
    assert written["model"] == "tiny"


def test_statistics_that_chose_chunk_sizes_are_in_the_records(start, tmp_path, monkeypatch):
    generate = harness.generate
    made = [Decision(9, None, statistic, None, 32, "length") for statistic in (None, 2.0, 3.0)]

    def watching(*args, **options):
        return [dataclasses.replace(result, decisions=tuple(made)) for result in generate(*args, **options)]

    monkeypatch.setattr(harness, "generate", watching)
    summary = start(tmp_path, policy="length")
    line = json.loads((tmp_path / "qasper.jsonl").read_text().splitlines()[0])
    assert line["decisions"] == [dataclasses.asdict(decision) for decision in made]
    assert summary.all.entropy == line["entropy"] == 2.5
    assert summary.policy == "length"


class Killed(BaseException):
    pass


def counting(monkeypatch, dies_after=None):
    """Count the samples that are generated for; optionally die before a batch."""
    done = []
    generate = harness.generate

    def counted(params, rows, **options):
        if dies_after is not None and len(done) >= dies_after:
            raise Killed
        done.extend(rows)
        return generate(params, rows, **options)

    monkeypatch.setattr(harness, "generate", counted)
    return done


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_killed_run_goes_on_and_ends_the_same(start, tmp_path, monkeypatch, batches):
    start(tmp_path / "whole")
    with monkeypatch.context() as patch:
        first = counting(patch, dies_after=2 * batches)
        with pytest.raises(Killed):
            start(tmp_path / "killed")
    second = counting(monkeypatch)
    start(tmp_path / "killed")
    assert len(first) + len(second) == 7
    assert read(tmp_path / "killed") == read(tmp_path / "whole")
    start(tmp_path / "killed")
    assert len(first) + len(second) == 7  # nothing was left to do


def test_a_half_written_line_is_dropped_and_a_whole_one_kept(start, tmp_path, monkeypatch):
    start(tmp_path)
    wanted, path = read(tmp_path), tmp_path / "qasper.jsonl"
    data = path.read_bytes()
    last = data.rstrip(b"\n").rindex(b"\n") + 1
    done = counting(monkeypatch)
    for end, again in ((len(data) - 1, 0), (len(data) - 2, 1), (last + 1, 1), (last, 1), (5, 5)):
        path.write_bytes(data[:end])
        done.clear()
        start(tmp_path)
        assert (len(done), read(tmp_path)) == (again, wanted)
    path.write_bytes(data[: last - 3] + b"\n" + data[last:])
    with pytest.raises(ValueError, match=r"qasper.jsonl, line 4: got no record; take the line out"):
        start(tmp_path)
    path.write_bytes(data + data[last:])
    with pytest.raises(ValueError, match=r"line 6: got a second record of sample 4"):
        read_lines(path)


def test_another_configuration_is_refused(start, params, data, tokenizer, tmp_path):
    start(tmp_path, tasks=["gov_report"])
    start(tmp_path, tasks=["gov_report"], batch=1)  # speed only
    with pytest.raises(ValueError, match=r"another configuration \(max_length was None, now 50\); wanted the same one"):
        start(tmp_path, tasks=["gov_report"], max_length=50)
    with pytest.raises(ValueError, match=r"tasks.qasper.data was absent, now"):
        start(tmp_path)
    with pytest.raises(ValueError, match=r"weights was"):
        run(tiny_params("mamba2", seed=1, vocab_size=320), data, tmp_path, tasks=["gov_report"], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["other"]}, "tasks: got other, wanted tasks with samples and a template in .*: gov_report, qasper"),
        ({"tasks": []}, "tasks: got none"),
        ({"max_length": 1}, "max_length: got 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"batch": 0}, "batch: got 0"),
        ({"shard": (3, 2)}, "shard: got 3/2, wanted i/n"),
        ({"shard": (8, 9)}, "shard: got 8/9, which leaves no sample"),
        ({"tokenizer": None}, "tokenizer: the checkpoint has none"),
    ],
)
def test_bad_arguments_are_named(start, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        start(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_unequal_shards_merge_into_the_run_of_one_process(start, tmp_path):
    whole = start(tmp_path / "whole")
    parts = [tmp_path / "parts" / f"shard-{i}" for i in (1, 2, 3)]
    assert [start(part, shard=(i + 1, 3)).all.samples for i, part in enumerate(parts)] == [3, 3, 1]
    merged = merge([tmp_path / "parts"], tmp_path / "merged")
    assert read(tmp_path / "merged") == read(tmp_path / "whole")
    for name in ("samples", "f1", "rouge_l", "exact_match", "new_tokens", "prompt_tokens"):
        assert getattr(merged.all, name) == pytest.approx(getattr(whole.all, name))
    with pytest.raises(ValueError, match=r"shards: gov_report: got 1 of 2 samples \(number 0 is missing\)"):
        merge(parts[1:])
    with pytest.raises(ValueError, match=r"got sample 0 a second time"):
        merge([parts[0], *parts])
    start(tmp_path / "odd", shard=(1, 3), max_length=50)
    with pytest.raises(ValueError, match=r"differ in max_length, wanted the parts of one run"):
        merge([tmp_path / "odd", *parts[1:]])
    with pytest.raises(ValueError, match="holds no run"):
        merge([tmp_path / "nothing"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"config": {"window": 1024}}')
    with pytest.raises(ValueError, match="holds a run of something else, wanted one of LongBench"):
        merge([tmp_path / "other"])


@needs_rouge
def test_the_command_runs_shards_and_merges_them(params, data, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    mamba_jax.save(params, tmp_path / "model")
    out = str(tmp_path / "out")
    options = ["--data", str(data), "-m", str(tmp_path / "model"), "--tokenizer", str(tmp_path / "tokenizer")]
    for part in ("1/2", "2/2"):
        result = CliRunner().invoke(cli.app, ["longbench", *options, "--out", out, "--shard", part, "--task", "qasper"])
        assert result.exit_code == 0, result.output
        assert "ROUGE-L" in result.stdout
    result = CliRunner().invoke(cli.app, ["longbench", "--merge", out, "--out", out, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tasks"]["qasper"]["samples"] == 5
    assert len(read(tmp_path / "out")["qasper.jsonl"]) == 5
    assert CliRunner().invoke(cli.app, ["longbench"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["longbench", *options, "--shard", "x"]).exit_code == 2


def test_a_missing_package_is_named_before_anything_runs_but_after_the_data(
    params, tokenizer, data, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ValueError, match=r"dataset2prompt\.json"):
        run(params, tmp_path, tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(ImportError, match=r"needs the package rouge: pip install 'mamba-jax\[eval\]'"):
        run(params, data, tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


@pytest.mark.reference
@needs_rouge
@pytest.mark.parametrize("model", ["mamba1-12m", "mamba2-12m-hf"])
def test_real_questions_stay_in_their_prompts(reference_dir, tmp_path, model):
    folder = reference_dir.parent / "data"
    if not (folder / "longbench").is_dir():
        pytest.skip(f"{folder} holds no LongBench samples")
    params = mamba_jax.load(reference_dir / model, dtype="float32")
    options = {"max_length": 300, "max_samples": 2, "max_new_tokens": 8, "batch": 8}
    summary = run(params, folder / "longbench", tmp_path, tokenizer=str(folder / "tokenizer"), **options)
    assert set(summary.tasks) == {"gov_report", "multifieldqa_en", "narrativeqa", "qasper"}
    assert (summary.all.samples, summary.all.cut) == (8, 8)
    tokenizer = mamba_jax.text.load_tokenizer(str(folder / "tokenizer"))
    for task, template in load_templates(folder / "longbench").items():
        if task in summary.tasks:
            for sample in load_samples(folder / "longbench" / f"{task}.jsonl"):
                ids, cut = cut_middle(tokenizer, template.render(sample), 300)
                assert cut > 0
                assert abs(len(ids) - 300) <= 5
                assert tokenizer.decode(ids).endswith(
                    template.text.partition("{context}")[2].format(input=sample.input)
                )
