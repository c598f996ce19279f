"""Policies: the paper's rules to the digit, guards, tables, names, and what every policy promises."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest

from mamba_jax.scheduler import policies
from mamba_jax.scheduler.policies import (
    COARSE_BUCKETS,
    PRESETS,
    EntropyRule,
    Guarded,
    LearnedTable,
    LengthRule,
    Midpoint,
    PerLayer,
    Random,
    Restricted,
    Rule,
    Sample,
    Static,
    TileRule,
    chunk_of_entropy,
    coarse_bucket,
    fit_table,
    h_ref_sensitivity,
    nearest_candidate,
    policy,
    raw_chunk,
    round_to_power_of_two,
    tile,
    tile_superseded,
)
from mamba_jax.scheduler.signals import Estimator

LN_K = math.log(256)
TABLE_29 = (2.27, 2.91, 3.22, 3.29, 3.61, 3.54, 3.50)

# Rules


def test_halves_of_the_exponent_go_to_the_even_one():
    # In floats log2 of these is exactly half-way.
    halves = {8.5: 2**8.5, 9.5: 2**9.5, 1.5: 2**1.5}
    for exponent, raw in halves.items():
        assert math.log2(raw) == exponent
    assert [round_to_power_of_two(raw) for raw in halves.values()] == [2**8, 2**10, 2**2]
    assert [round_to_power_of_two(raw) for raw in (0.0, 1.0, 1.4, 1.5, 363, 430.4)] == [1, 1, 1, 2, 512, 512]


def test_the_papers_example_is_a_chunk_of_512_only_with_log_k():
    assert raw_chunk(0.83, 1.0) == pytest.approx(430.4)
    assert chunk_of_entropy(0.83, 1.0) == 512
    assert chunk_of_entropy(4.60, LN_K) == 512
    assert chunk_of_entropy(4.60, 8.0) == 256


@pytest.mark.parametrize(
    ("c_min", "c_max", "h_ref", "candidates", "boundaries"),
    [
        (32, 512, None, (32, 64, 128, 256, 512), (0.153, 0.676, 1.722, 3.813)),
        (32, 512, 8.0, (32, 64, 128, 256, 512), (0.221, 0.975, 2.484, 5.501)),
        (128, 512, None, (128, 256, 512), (0.766, 3.380)),
        (128, 1024, None, (128, 256, 512, 1024), (0.328, 1.448, 3.689)),
        (128, 2048, None, (128, 256, 512, 1024, 2048), (0.153, 0.676, 1.722, 3.813)),
        (64, 512, None, (64, 128, 256, 512), (0.328, 1.448, 3.689)),
    ],
)
def test_decision_boundaries(c_min, c_max, h_ref, candidates, boundaries):
    rule = EntropyRule(c_min=c_min, c_max=c_max, h_ref=h_ref)
    assert rule.candidates == candidates
    assert rule.boundaries == pytest.approx(boundaries, abs=6e-4)
    for index, boundary in enumerate(rule.boundaries):
        below, above = (rule.choose(100, 0, {"entropy": boundary + step}).chunk for step in (-1e-6, 1e-6))
        assert (below, above) == candidates[index : index + 2]


@pytest.mark.parametrize(("c_min", "c_max"), [(32, 512), (40, 300), (48, 500), (7, 7), (1, 4096)])
def test_boundaries_are_the_rule(c_min, c_max):
    rule = EntropyRule(c_min=c_min, c_max=c_max)
    for entropy in np.linspace(0, 6, 997).tolist():
        by_index = rule.candidates[sum(entropy > boundary for boundary in rule.boundaries)]
        assert by_index == rule.choose(9, statistics={"entropy": entropy}).chunk


def test_table_20():
    # The entropies before rounding: 4.60 and 4.02 do not give the printed r.
    table = h_ref_sensitivity([4.6043, 4.022], [math.log(64), 5.0, 6.0, 8.0])
    printed = [1.0, 0.966, 0.921, 0.804, 0.767, 0.670, 0.576, 0.503]
    assert [row["r"] for row in table] == pytest.approx(printed, abs=1.1e-3)
    assert [row["chunk"] for row in table] == [512, 512, 512, 512, 512, 256, 256, 256]
    assert [row["chunk"] for row in h_ref_sensitivity([4.6043, 4.022], [LN_K])] == [512, 512]


def test_table_29_is_the_legacy_rule():
    raws = [raw_chunk(entropy, LN_K) for entropy in TABLE_29]
    assert raws == pytest.approx([228.5, 283.9, 310.7, 316.8, 344.5, 338.4, 335.0], abs=0.06)
    assert [chunk_of_entropy(entropy, LN_K) for entropy in TABLE_29] == [256] * 7
    assert [chunk_of_entropy(entropy, 8.0) for entropy in TABLE_29] == [128] + [256] * 6  # what the paper prints


def test_tiles():
    assert raw_chunk(0.83, 1.0, 64, 512) == pytest.approx(435.84)
    assert tile(0.83, 1.0) == 512
    assert tile_superseded(0.83, 1.0) == 448
    assert {tile(entropy, LN_K) for entropy in np.linspace(0, 6, 500)} == {64, 128, 256, 512}
    assert {tile_superseded(bits) for bits in np.linspace(0, 9, 5000)} == set(range(64, 513, 32))
    assert [tile_superseded(bits) for bits in (4.022, 4.18, 5.17)] == [288, 288, 352]  # Tables 14 and 22


def test_coarse_buckets():
    assert [coarse_bucket(c) for c in (288, 320, 352, 384, 416, 448)] == [256, 256, 256, 256, 512, 512]
    assert [coarse_bucket(c) for c in (1, 32, 48, 49, 96, 97, 192, 193, 9999)] == [
        32,
        32,
        32,
        64,
        64,
        128,
        128,
        256,
        512,
    ]


def test_nearest_candidate_measures_in_log2_and_prefers_the_smaller():
    assert nearest_candidate(128, (64, 256)) == 64
    assert nearest_candidate(180, (128, 256)) == 128
    assert nearest_candidate(182, (256, 128)) == 256
    assert coarse_bucket(185, (128, 256)) == 128  # nearer in distance


# Policies


def test_choices_are_records():
    assert EntropyRule().choose(976, 3, {"entropy": 3.22, "variance": 1.0}) == policies.Decision(
        length=976,
        layer=3,
        statistic=3.22,
        raw_chunk=pytest.approx(310.7, abs=0.1),
        chunk=256,
        policy="entropy:histogram",
        guard_fired=False,
        honoured=True,
    )
    record = dataclasses.asdict(Static(64).choose(7))
    assert json.loads(json.dumps(record)) == {
        "length": 7,
        "layer": None,
        "statistic": None,
        "raw_chunk": None,
        "chunk": 64,
        "policy": "static:64",
        "guard_fired": False,
        "honoured": True,
        "implementation": "xla",
    }


def test_midpoint():
    assert Midpoint().choose(5).chunk == 256
    assert Midpoint(128, 512).choose(5).chunk == 256
    assert Midpoint(128, 2048).choose(5).chunk == 1024
    assert Midpoint(128, 2048).choose(5).raw_chunk == 1088


def test_random_is_a_function_of_its_arguments():
    def choices(seed):
        return [
            Random(seed).choose(n, layer, None, p).chunk for n in (5, 976) for layer in range(20) for p in range(20)
        ]

    assert choices(0) == choices(0)
    assert choices(0) != choices(1)
    counts = [choices(0).count(chunk) for chunk in COARSE_BUCKETS]
    assert sum(counts) == 800
    assert min(counts) > 160 - 50  # four standard deviations
    assert max(counts) < 160 + 50
    for other in ((6, 0, None, 0), (5, 1, None, 0), (5, None, None, 0), (5, 0, None, 1)):
        assert any(Random(s).choose(5, 0).chunk != Random(s).choose(*other).chunk for s in range(20))
    # The stream is numpy's and does not change.
    assert [Random(0).choose(976, layer).chunk for layer in range(6)] == [32, 32, 128, 256, 32, 128]


@pytest.mark.parametrize(
    ("spec", "passing"),
    [
        ("guarded:sampled:128..2048", (128, 2048)),
        ("guarded:sampled", (32, 64, 128)),
        ("guarded:sampled:128..512", (128,)),
    ],
)
def test_guard(spec, passing):
    guarded = policy(spec)
    assert isinstance(guarded, Guarded)
    assert guarded.estimator == Estimator("sampled")
    assert guarded.candidates == tuple(sorted({*passing, 512}))
    for entropy in np.linspace(0, 5.6, 200).tolist():
        free = guarded.policy.choose(976, 1, {"entropy": entropy})
        held = guarded.choose(976, 1, {"entropy": entropy})
        assert held.guard_fired == (free.chunk not in passing)
        assert held == dataclasses.replace(
            free, chunk=512 if held.guard_fired else free.chunk, guard_fired=held.guard_fired, policy=spec
        )


def test_guard_margin_and_fallback():
    def chunks(margin, fallback=256):
        guarded = Guarded(EntropyRule(), fallback, margin)
        return [guarded.choose(9, 0, {"entropy": entropy}).chunk for entropy in (0.1, 0.3, 1.0, 2.0, 5.0)]

    assert chunks(0) == [32, 64, 128, 256, 512]
    assert chunks(1) == [32, 64, 128, 256, 512]
    assert chunks(2) == [32, 64, 256, 256, 256]
    assert chunks(3) == [32, 256, 256, 256, 256]
    assert chunks(2, fallback=64) == [64, 64, 64, 256, 512]


def test_length_rule_includes_its_threshold():
    assert [LengthRule().choose(n).chunk for n in (1, 49, 50, 51, 4096)] == [128, 128, 128, 512, 512]


def test_per_layer():
    each = PerLayer([64, 128, 64])
    assert [each.choose(9, layer).chunk for layer in range(3)] == [64, 128, 64]
    for layer in (None, 3, -1):
        with pytest.raises(ValueError, match="layer: got"):
            each.choose(9, layer)


def test_restricted_choices_are_candidates():
    restricted = Restricted(EntropyRule(), (256, 48))
    assert restricted.candidates == (48, 256)
    chunks = [restricted.choose(9, 0, {"entropy": e}) for e in (0.1, 0.3, 1.0, 2.0, 5.0)]
    assert [choice.chunk for choice in chunks] == [48, 48, 256, 256, 256]
    assert [choice.raw_chunk for choice in chunks] == [
        EntropyRule().choose(9, 0, {"entropy": e}).raw_chunk for e in (0.1, 0.3, 1.0, 2.0, 5.0)
    ]
    assert Restricted(Static(16), (32, 64)).candidates == (32,)


def test_bits_tile_legacy_is_table_14():
    rule = TileRule()
    assert rule.estimator.units == "bits"
    choice = rule.choose(200, None, {"entropy": 4.022})
    assert (choice.chunk, round(choice.raw_chunk, 1)) == (256, 289.2)
    # The same tensor in nats under the rule that the paper prints beside it.
    assert EntropyRule().choose(200, None, {"entropy": 4.022 * math.log(2)}).chunk == 256
    assert EntropyRule().choose(200, None, {"entropy": 4.022}).chunk == 512


def test_presets_are_three_different_schedulers():
    chunks = {
        name: PRESETS[name].choose(976, 0, {"entropy": 2.27}).chunk for name in PRESETS if name != "bits-tile-legacy"
    }
    assert chunks == {"corey-default": 256, "corey-legacy": 128, "corey-h800": 1024}


SPECS = (
    *PRESETS,
    "static:128",
    "midpoint",
    "midpoint:128..2048",
    "random:7",
    "random:7:64..256",
    "length",
    "layers:64,128,128",
    "entropy:histogram",
    "entropy:token",
    "entropy:sampled-robust",
    "entropy:sampled:128..2048",
    "guarded:sampled",
    "guarded:kurtosis:128..2048",
    "guarded:histogram-robust",
    "guarded:corey-h800",
    "guarded:length",
)


@pytest.mark.parametrize("spec", SPECS)
def test_what_every_policy_promises(spec):
    found = policy(spec)
    assert found.name == spec
    assert policy(spec) == found
    assert hash(policy(spec)) == hash(found)
    assert list(found.candidates) == sorted(set(found.candidates))
    seen = set()
    for entropy in np.linspace(0, 8, 60).tolist():
        for length in (1, 50, 51, 4096):
            choice = found.choose(length, 1, {"entropy": entropy})
            assert choice == found.choose(length, 1, {"entropy": entropy})
            assert (choice.length, choice.layer, choice.policy, choice.honoured) == (length, 1, spec, True)
            assert choice.statistic == (None if found.estimator is None else entropy)
            seen.add(choice.chunk)
    assert seen <= set(found.candidates)
    if not isinstance(found, (Random, PerLayer)):
        assert seen == set(found.candidates)
    with pytest.raises(ValueError, match="length: got 0"):
        found.choose(0, 1, {"entropy": 1.0})
    for missing in (None, {}, {"entropy": math.nan}, {"entropy": math.inf}):
        if found.estimator is not None:
            with pytest.raises(ValueError, match="statistics: got"):
                found.choose(5, 1, missing)
        else:
            assert found.choose(5, 1, missing).chunk in found.candidates


def test_shorthands():
    assert policy("entropy") == policy("entropy:histogram")
    assert policy("guarded") == policy("guarded:sampled")
    assert policy("random") == policy("random:0")
    assert policy("entropy:128..2048") == policy("entropy:histogram:128..2048")
    assert policy("entropy:sampled-robust").estimator == Estimator("sampled", range="robust")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "wanted one of corey-default"),
        ("fastest", "wanted one of corey-default.*static:CHUNK.*table:PATH"),
        ("static", "wanted a chunk"),
        ("static:-3", "got '-3'"),
        ("static:0", r"chunk: got \(0,\), wanted whole numbers from 1"),
        ("static:" + "9" * 18, "wanted whole numbers from 1 to 1073741824"),
        ("static:" + "9" * 50, "wanted a chunk"),
        ("midpoint:1.." + "9" * 20, "c_max <= 1073741824"),
        ("table:", "wanted a file's path"),
        ("midpoint:7", "wanted a range"),
        ("midpoint:512..32", "c_min <= c_max"),
        ("random:x", "wanted a seed"),
        ("entropy:median", "histogram, sampled, token, cheap"),
        ("guarded:median", "wanted one of corey-default"),
        ("length:50", "nothing after"),
        ("layers:", "wanted chunks"),
        ("layers:64,,64", "wanted chunks"),
    ],
)
def test_strings_that_name_no_policy_say_what_there_is(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        policy(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("spec", [3, b"static:64", ["static:64"], None])
def test_what_is_no_string_names_no_policy(spec):
    with pytest.raises(ValueError, match=r"^policy: got .*, wanted a string"):
        policy(spec)


def test_guards_nest_only_so_deep():
    assert policy("guarded:" * 8 + "static:64").candidates == (64, 512)
    for count in (9, 2000, 100_000):
        with pytest.raises(ValueError, match=r"^policy: got 'guarded:.*wanted at most 8 times 'guarded:'") as error:
            policy("guarded:" * count + "static:64")
        assert len(str(error.value)) < 300


def test_more_names_come_first():
    more = {"calibrated": lambda rest: Static(int(rest or 16)), "length": lambda rest: Static(1)}
    assert policy("calibrated", more) == Static(16)
    assert policy("calibrated:8", more) == Static(8)
    assert policy("length", more) == Static(1)
    assert policy("guarded:calibrated:8", more) == Guarded(Static(8))
    with pytest.raises(ValueError, match="wanted one of calibrated, length, corey-default"):
        policy("fastest", more)


# Tables


def test_the_first_rule_that_holds_decides_and_bounds_are_inclusive():
    table = LearnedTable(
        (
            Rule(16, layer_min=2, layer_max=3),
            Rule(32, length_max=50),
            Rule(64, entropy_min=1.0, entropy_max=2.0, length_max=100),
            Rule(128, variance_min=5.0),
        ),
        default=256,
    )
    assert table.features == ("length", "layer", "entropy", "variance")
    assert table.candidates == (16, 32, 64, 128, 256)

    def chunk(length, layer, entropy, variance):
        return table.choose(length, layer, {"entropy": entropy, "variance": variance}).chunk

    assert [chunk(9, layer, 0.0, 0.0) for layer in (1, 2, 3, 4)] == [32, 16, 16, 32]
    assert [chunk(length, 0, 1.5, 9.0) for length in (50, 51, 100, 101)] == [32, 64, 64, 128]
    assert [chunk(60, 0, entropy, 0.0) for entropy in (0.99, 1.0, 2.0, 2.01)] == [256, 64, 64, 256]
    assert [chunk(600, 0, 0.0, variance) for variance in (4.99, 5.0)] == [256, 128]


def test_tables_ask_only_for_what_their_rules_look_at():
    by_length = LearnedTable((Rule(128, length_max=50),), 512)
    assert by_length.estimator is None
    assert [by_length.choose(n).chunk for n in (50, 51)] == [128, 512]
    by_entropy = LearnedTable((Rule(128, entropy_max=1.0),), 512, Estimator("token"))
    assert by_entropy.estimator == Estimator("token")
    assert by_entropy.choose(9, None, {"entropy": 1.0}).statistic == 1.0
    with pytest.raises(ValueError, match="statistics: got None for 'entropy'"):
        by_entropy.choose(9, 0, {"variance": 1.0})
    with pytest.raises(ValueError, match="statistics: got None for 'variance'"):
        LearnedTable((Rule(128, variance_max=1.0),), 512).choose(9, 0, {"entropy": 1.0})
    with pytest.raises(ValueError, match="layer: got None"):
        LearnedTable((Rule(128, layer_max=1),), 512).choose(9)


def samples(rng, count, **laws):
    for _ in range(count):
        features = {
            "length": int(rng.integers(1, 400)),
            "layer": int(rng.integers(0, 48)),
            "entropy": float(np.float32(rng.uniform(0, 5))),
            "variance": float(np.float32(rng.uniform(0, 2))),
        }
        yield Sample(chunk=laws["chunk"](**features), **features)


def test_a_fitted_table_finds_the_papers_rule():
    law = lambda length, **_: 128 if length <= 50 else 512  # noqa: E731
    table = fit_table(list(samples(np.random.default_rng(0), 2000, chunk=law)))
    assert table == LearnedTable((Rule(128, length_max=50),), 512)


def test_a_fitted_table_is_the_tree():
    from sklearn.tree import DecisionTreeClassifier

    def law(length, layer, entropy, variance):
        return 32 if entropy > 3.1 else 64 if layer < 7 else 256 if variance > 0.5 and length > 99 else 128

    rng = np.random.default_rng(1)
    train = list(samples(rng, 300, chunk=law))
    table = fit_table(train, max_depth=5, statistic=Estimator("token"), label="mine")
    rows = np.array([[s.length, s.layer, s.entropy, s.variance] for s in train], np.float32)
    tree = DecisionTreeClassifier(max_depth=5, random_state=0).fit(rows, [s.chunk for s in train])
    # Values at the thresholds and beside them, where an inclusive bound on the wrong side would show.
    for column, name in enumerate(policies.FEATURES):
        for threshold in tree.tree_.threshold[tree.tree_.feature == column]:
            near = np.float32(threshold)
            for value in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1e9))):
                row = rows[rng.integers(len(rows))].copy()
                row[column] = round(float(value)) if column < 2 else value
                predicted = tree.predict(row[None])[0]
                choice = table.choose(int(row[0]), int(row[1]), {"entropy": float(row[2]), "variance": float(row[3])})
                assert choice.chunk == predicted, name
    for row, predicted in zip(rows, tree.predict(rows), strict=True):
        statistics = {"entropy": float(row[2]), "variance": float(row[3])}
        assert table.choose(int(row[0]), int(row[1]), statistics).chunk == predicted
    assert table.estimator == Estimator("token")
    assert table.name == "mine"


def test_a_value_at_a_threshold_is_below_it():
    table = fit_table([Sample(512, 9, entropy=1.0)] * 2 + [Sample(128, 9, entropy=3.0)])
    assert [table.choose(9, None, {"entropy": h}).chunk for h in (2.0, math.nextafter(2.0, 3))] == [512, 128]


def test_fit_uses_the_features_that_all_samples_have():
    train = [Sample(128, 10, entropy=1.0), Sample(512, 99, entropy=2.0), Sample(512, 100)]
    assert fit_table(train).features == ("length",)
    assert fit_table([Sample(64, 5), Sample(64, 9)]) == LearnedTable((), 64)
    with pytest.raises(ValueError, match="samples: got some without entropy"):
        fit_table(train, features=["entropy"])
    with pytest.raises(ValueError, match="features: got colour"):
        fit_table(train, features=["colour"])
    with pytest.raises(ValueError, match="samples: got none"):
        fit_table([])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    with pytest.raises(ImportError, match=r"mamba-jax\[calibrate\]"):
        fit_table([Sample(64, 5)])


def test_tables_round_trip(tmp_path):
    table = LearnedTable(
        (Rule(128, length_max=50), Rule(64, entropy_min=math.nextafter(2.5, 3))), 512, Estimator("token")
    )
    assert LearnedTable.from_json(table.to_json()) == table
    path = tmp_path / "a b:c.json"
    path.write_text(table.to_json())
    read = policy(f"table:{path}")
    assert read == dataclasses.replace(table, label=f"table:{path}")
    assert read.choose(50, 0, {"entropy": 0.0}).policy == f"table:{path}"
    path.write_text('{"default": 64, "rules": []}')
    assert policy(f"table:{path}").choose(7).chunk == 64


def rule(text):
    return f'{{"default": 64, "rules": [{{"chunk": 9}}, {{"chunk": 32, {text}}}]}}'


def estimator(text):
    return f'{{"default": 64, "rules": [], "estimator": {text}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", r"table: got \[\], wanted an object"),
        ("{}", "table: got no default, rules"),
        ('{"rules": []}', "table: got no default"),
        (
            '{"default": 64, "rules": [], "colour": 1}',
            "table: got 'colour', wanted no keys but default, estimator, rules",
        ),
        ('{"default": 64, "rules": {}}', r"rules: got \{\}, wanted a list"),
        ('{"default": 64, "rules": [5]}', r"rules\[0\]: got 5, wanted an object"),
        ('{"default": 64, "rules": [{"length_max": 1}]}', r"rules\[0\]: got no chunk"),
        ('{"default": 64.5, "rules": []}', "default: got"),
        ('{"default": 10000000000, "rules": []}', "default: got"),
        (rule('"colour": 1'), r"rules\[1\]: got 'colour', wanted no keys but chunk, entropy_max"),
        (rule('"length_max": "long"'), r"rules\[1\]: length_max: got 'long', wanted a whole number"),
        (rule('"length_max": 5.5'), r"rules\[1\]: length_max: got 5.5, wanted a whole number"),
        (rule('"layer_min": NaN'), r"rules\[1\]: layer_min: got nan, wanted a whole number"),
        (rule('"entropy_min": NaN'), r"rules\[1\]: entropy_min: got nan, wanted a finite number"),
        (rule('"variance_max": Infinity'), r"rules\[1\]: variance_max: got inf, wanted a finite number"),
        (rule('"entropy_min": 2, "entropy_max": 1.5'), r"rules\[1\]: entropy_min, entropy_max: got 2, 1.5, wanted"),
        (estimator('{"kind": "median"}'), "estimator: kind: got 'median'"),
        (estimator('{"kind": ["token"]}'), "estimator: kind: got"),
        (estimator('{"colour": 1}'), "estimator: got 'colour', wanted no keys but bins"),
        (estimator("null"), "estimator: got None, wanted an object"),
        (estimator('{"bins": 2.5}'), "estimator: bins: got 2.5, wanted an integer from 2 to 65536"),
        (estimator('{"bins": 1000000000000}'), "estimator: bins: got 1000000000000, wanted an integer from 2 to 65536"),
        (estimator('{"stride": 1.5}'), "estimator: stride: got 1.5, wanted an integer from 1"),
        (estimator('{"stride": true}'), "estimator: stride: got True"),
        (estimator('{"eps": "1"}'), "estimator: eps: got '1'"),
        ("[" * 100_000, "recursion"),
        ("\udcff", "utf-8"),
        ('{"default": 64, "rules": []}' + " " * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_files_that_are_no_tables_are_refused(text, message, tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"table\.json: not a table of rules: .*{message}"):
        policy(f"table:{path}")
    with pytest.raises(FileNotFoundError):
        policy(f"table:{tmp_path}/missing.json")


# Arguments


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Static(0), "chunk"),
        (lambda: Static(True), "chunk"),
        (lambda: Static(64.0), "chunk"),
        (lambda: PerLayer(()), "chunks"),
        (lambda: LengthRule(short=0), "short, long"),
        (lambda: Random(-1), "seed"),
        (lambda: Midpoint(0, 5), "c_min, c_max"),
        (lambda: EntropyRule(h_ref=0.0), "h_ref"),
        (lambda: Guarded(Static(4), fallback=0), "fallback"),
        (lambda: Guarded(Static(4), min_delta_buckets=-1), "min_delta_buckets"),
        (lambda: Restricted(Static(4), ()), "chunks"),
        (lambda: LearnedTable((), 0), "default"),
        (lambda: Rule(64, length_max=True), "length_max"),
        (lambda: Rule(64, layer_min=2, layer_max=1), "layer_min, layer_max"),
        (lambda: Guarded(3), "policy"),
        (lambda: Guarded(Static), "policy"),
        (lambda: Restricted("static:64", (64,)), "policy"),
    ],
)
def test_policies_that_cannot_be_are_named(make, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        make()


def test_a_rule_reads_what_an_estimator_gives():
    u = np.random.default_rng(0).standard_normal((1, 64, 128)).astype(np.float32)
    rule = policy("entropy:sampled")
    entropy = jax.jit(rule.estimator)(u)
    assert rule.choose(64, 0, {"entropy": float(entropy)}).chunk == 512
    index = sum(entropy > boundary for boundary in rule.boundaries)
    assert rule.candidates[int(index)] == 512
