"""The models behind lm-eval's interface, against what they say when they are asked directly."""

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest

import mamba_jax
from mamba_jax import generate, score
from tests import small_tokenizers
from tests.tiny import tiny_params

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'mamba-jax[eval]'")
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from mamba_jax.lm_eval import MambaJax

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's own and those of what it imports

NIGHT = "It was a dark night and the wind was high, so they waited for the morning."
PAIRS = [
    ("It was a dark", " night"),
    (NIGHT * 2, " She said:"),
    ("He", " did not answer; he went on without a word."),
    ("So they waited for ", "the morning"),  # the space belongs to the continuation
    ("", "It was a night"),
    ("  ", "night"),
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" "], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def instances(kind, arguments):
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


@pytest.fixture(scope="module")
def params():
    return tiny_params("mamba2", vocab_size=320, text=mamba_jax.TextInfo(eos_token_ids=(0,)))


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizers.byte_level()


@pytest.fixture(scope="module")
def model(params, tokenizer):
    return MambaJax(params, tokenizer=tokenizer, batch_size=4)


def by_hand(params, before, after):
    """The continuation's log-probability, and whether it is what the model would say."""
    logprobs = score(params, [before + after])[0].logprobs
    greedy = generate(params, before, max_new_tokens=len(after), stop_token_ids=[])
    return sum(logprobs[len(before) :]), greedy.tokens == after


def split(tokenizer, context, continuation):
    ids = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    kept = context.rstrip()
    before = ids(kept)
    return before or [0], ids(context + continuation)[len(before) :]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_continuations_are_scored_in_order(params, tokenizer, batch_size):
    model = MambaJax(params, tokenizer=tokenizer, batch_size=batch_size)
    found = model.loglikelihood(instances("loglikelihood", PAIRS))
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        wanted, likeliest = by_hand(params, *split(tokenizer, context, continuation))
        assert total == pytest.approx(wanted, abs=1e-4)
        assert greedy is likeliest


def test_what_the_model_would_say_is_greedy(params, model, tokenizer):
    before = tokenizer("It was a dark")["input_ids"]
    said = generate(params, before, max_new_tokens=6, stop_token_ids=[]).tokens
    other = [*said[:-1], (said[-1] + 1) % 320]
    (_, yes), (_, no) = model._loglikelihood_tokens([(None, before, said), (None, before, other)])
    assert (yes, no) == (True, False)


def test_a_continuation_that_the_tokenizer_joins_to_its_context_is_not_lost(model, tokenizer):
    class Joining:
        """Makes one token of "ab" and of "a"."""

        added_tokens_decoder, eos_token_id = tokenizer.added_tokens_decoder, 0

        def __call__(self, text, **options):
            return {"input_ids": [5] if text in ("a", "ab") else [6] * len(text)}

    joined = MambaJax(model.params, tokenizer=Joining())
    assert joined._encode_pair("a", "b") == ([5], [6])


def test_the_end_of_a_long_text_is_read(params, tokenizer, caplog):
    model = MambaJax(params, tokenizer=tokenizer, max_length=12)
    before, after = split(tokenizer, NIGHT, " She said")
    with caplog.at_level(logging.WARNING):
        ((total, _),) = model.loglikelihood(instances("loglikelihood", [(NIGHT, " She said")]))
    assert total == pytest.approx(by_hand(params, before[-13 + len(after) :], after)[0], abs=1e-4)
    assert "1 of 1 texts are longer than max_length=12" in caplog.text
    with pytest.raises(ValueError, match="max_length: got 12, wanted at least"):
        model.loglikelihood(instances("loglikelihood", [("It", " " + NIGHT)]))
    (text,) = model.generate_until(instances("generate_until", [(NIGHT, {"max_gen_toks": 4})]))
    ids = tokenizer(NIGHT)["input_ids"][-8:]
    assert text == generate(params, ids, max_new_tokens=4, tokenizer=tokenizer).text
    with pytest.raises(ValueError, match="max_gen_toks: got 12, wanted less than max_length"):
        model.generate_until(instances("generate_until", [(NIGHT, {"max_gen_toks": 12})]))


@pytest.mark.parametrize("max_length", [8, 2048])
def test_rolling_predicts_each_token_once(params, tokenizer, max_length):
    model = MambaJax(params, tokenizer=tokenizer, max_length=max_length)
    texts = ["It was", NIGHT, ""]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]))
    for text, total in zip(texts, found, strict=True):
        ids, wanted, done = [0, *tokenizer(text)["input_ids"]], 0.0, 1
        while done < len(ids):
            end = min(done + max_length, len(ids))
            begin = max(end - max_length - 1, 0)
            wanted += by_hand(params, ids[begin:done], ids[done:end])[0]
            done = end
        assert total == pytest.approx(wanted, abs=1e-3)


def test_generations_stop_and_stay_in_order(params, model, tokenizer):
    kwargs = [
        {"until": ["e"], "max_gen_toks": 12},
        {"until": "\n\n", "max_gen_toks": 3},
        {"until": ["e", ""], "max_gen_toks": 12, "do_sample": False, "temperature": 1.0},
        {"max_gen_toks": 9, "temperature": 1.0, "top_p": 0.9, "do_sample": True},
    ]
    contexts = ["It was", NIGHT, "He", "She said: ", "so", "", "a", "b"]
    arguments = [(context, kwargs[i % 4]) for i, context in enumerate(contexts)]
    found = model.generate_until(instances("generate_until", arguments))
    assert len(set(found)) > 2
    for i, ((context, asked), text) in enumerate(zip(arguments, found, strict=True)):
        options = {"temperature": 1.0, "top_p": 0.9, "seed": i} if asked.get("do_sample") else {}
        if "until" in asked:
            options["stop"] = asked["until"][0] if isinstance(asked["until"], list) else asked["until"]
        options |= {"max_new_tokens": asked["max_gen_toks"], "stop_token_ids": [0], "tokenizer": tokenizer}
        assert text == generate(params, tokenizer(context)["input_ids"] or [0], **options).text


def test_a_special_token_stops(params, tokenizer):
    said = generate(params, tokenizer("It was")["input_ids"], max_new_tokens=6, stop_token_ids=[]).tokens
    marked = small_tokenizers.byte_level()
    marked.add_special_tokens({"additional_special_tokens": [marked.convert_ids_to_tokens(said[3])]})
    model = MambaJax(params, tokenizer=marked)
    stop = marked.convert_ids_to_tokens(said[3])
    strings, ids = model._stops([stop, "x", ""])
    assert (strings, ids) == (["x"], [0, said[3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0, wanted a number of at least 1"),
        ({"batch_size": "many"}, "batch_size: got 'many'"),
        ({"max_length": 1}, "max_length: got 1"),
        ({"tokenizer": None}, "tokenizer: there is none beside the weights"),
    ],
)
def test_bad_arguments_are_named(params, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        MambaJax(params, **{"tokenizer": tokenizer, **options})


def test_unknown_generation_arguments_are_named(model):
    with pytest.raises(ValueError, match=r"gen_kwargs: got \['num_beams'\], wanted some of until"):
        model.generate_until(instances("generate_until", [("a", {"num_beams": 3})]))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Folder of three tasks over two local rows."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": "It was a dark", "choices": [" night", " morning"], "label": 0, "answer": "x"},
        {"question": "He did not", "choices": [" high", " answer"], "label": 1, "answer": "y"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        files = json.dumps({"data_files": {"test": str(folder / "rows.jsonl")}})
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + body)
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_local_tasks_run_through_lm_eval(params, model, tokenizer, tasks):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    rows = [json.loads(line) for line in (tasks / "rows.jsonl").read_text().splitlines()]
    right = []
    for row in rows:
        totals = [by_hand(params, *split(tokenizer, row["question"], choice))[0] for choice in row["choices"]]
        right.append(totals.index(max(totals)) == row["label"])
    assert results["results"]["choices"]["acc,none"] == sum(right) / 2
    assert results["results"]["texts"]["byte_perplexity,none"] > 1
    for row, sample in zip(rows, results["samples"]["answers"], strict=True):
        options = {"max_new_tokens": 5, "stop": " ", "tokenizer": tokenizer, "stop_token_ids": [0]}
        assert sample["resps"] == [[generate(params, row["question"], **options).text]]


def test_the_command_line_knows_the_model(params, tokenizer, tasks, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    mamba_jax.save(params, tmp_path / "model")
    arguments = f"pretrained={tmp_path / 'model'},tokenizer={tmp_path / 'tokenizer'},dtype=float32"
    command = [sys.executable, "-m", "mamba_jax.lm_eval", "--model", "mamba_jax", "--model_args", arguments]
    command += ["--tasks", "answers", "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "|answers|" in done.stdout
