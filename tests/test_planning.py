"""Plans: the static choice by measured tables or rules, policies, what a statistic may choose at run time."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest

import mamba_jax
from mamba_jax import init_params, planning
from mamba_jax.calibrate import _turns
from mamba_jax.models.lm import hidden_states
from mamba_jax.ops import dispatch
from mamba_jax.planning import LAG, Careful, Model, as_policy, choices, decide, make_plan, programs_for
from mamba_jax.programs import BLOCK, Spec, lower_shapes
from mamba_jax.scheduler.calibration import Calibration, Timing, write_calibration
from mamba_jax.scheduler.chunks import default_chunk_size
from mamba_jax.scheduler.policies import Decision, LearnedTable, PerLayer, Rule, Static
from tests.tiny import tiny_config, tiny_params

ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
MODEL = Model(tiny_config("mamba2"), "float32", "gpu", "Planned Device")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path))
    timings = [Timing(16, 16, (1.0,)), Timing(64, 16, (3.0,)), Timing(64, 32, (2.0,)), Timing(64, 64, (2.008,))]
    timings += [Timing(512, size, (seconds,)) for size, seconds in ((32, 20.0), (64, 10.0), (256, 10.04), (512, 12.0))]
    write_calibration(Calibration(MODEL.device, planning.shape_of(MODEL, 1), "0.11.2", "2026-01-01", tuple(timings)))
    planning.forget_choices()
    yield
    monkeypatch.undo()
    planning.forget_choices()


def chunk_sizes(plan):
    return [(segment.length, segment.chunk_size) for segment in plan.segments]


@pytest.mark.usefixtures("measured")
def test_the_static_choice_is_the_cheapest_cover_at_the_fastest_chunk_sizes():
    plan = make_plan(MODEL, 1, 590)
    assert chunk_sizes(plan) == [(512, 64), (64, 32), (16, 16)]
    assert plan.seconds == pytest.approx(13.0)
    assert [segment.seconds for segment in plan.segments] == [10.0, 2.0, 1.0]
    assert "Planned Device, 2026-01-01" in plan.source
    for segment in plan.segments:
        assert segment.decisions == (Decision(590, None, None, None, segment.chunk_size, "measured"),)


@pytest.mark.usefixtures("measured")
def test_another_batch_size_borrows_but_expects_no_time():
    plan = make_plan(MODEL, 2, 600)
    assert chunk_sizes(plan) == chunk_sizes(make_plan(MODEL, 1, 600))
    assert plan.seconds is None
    assert "nearest shape" in plan.source


def test_where_nobody_measured_there_is_a_stated_rule_and_a_hint():
    plan = make_plan(Model(MODEL.config, "float32", "gpu", "Unknown Device"), 3, 3000)
    assert plan.batch == 4
    assert chunk_sizes(plan) == [(2048, 128), (1024, 128)]
    assert plan.seconds is None
    assert "mamba-jax calibrate" in plan.source


@pytest.mark.parametrize(
    ("name", "length", "wanted"),
    [
        ("static:128", 3000, [(2048, 128), (1024, 128)]),
        ("length", 50, [(64, 64)]),
        ("length", 3000, [(2048, 512), (1024, 512)]),
        ("midpoint", 3000, [(2048, 256), (1024, 256)]),
        ("layers:64,32", 3000, [(2048, (64, 32)), (1024, (64, 32))]),
        ("layers:64,64", 3000, [(2048, 64), (1024, 64)]),
    ],
)
def test_a_policy_decides_chunk_sizes(name, length, wanted):
    model = Model(MODEL.config, "float32", "gpu", "Unknown Device")
    plan = make_plan(model, 1, length, as_policy(name))
    assert chunk_sizes(plan) == wanted
    assert {decision.policy for segment in plan.segments for decision in segment.decisions} == {name}


def test_what_cannot_be_run_is_marked_as_not_honoured():
    plan = make_plan(Model(MODEL.config, "float32", "gpu", "Unknown Device"), 1, 40, Static(128))
    (decision,) = plan.segments[0].decisions
    assert (plan.segments[0].chunk_size, decision.chunk, decision.honoured) == (64, 128, False)


def test_a_statistic_chooses_from_the_third_segment_on():
    model = Model(MODEL.config, "float32", "gpu", "Unknown Device")
    plan = make_plan(model, 1, 4 * 2048, as_policy("corey-default"))
    assert chunk_sizes(plan) == [(2048, 128)] * 4
    assert plan.candidates == {2048: (32, 64, 128, 256, 512)}
    watch = planning.watch_for(as_policy("corey-default"))
    assert [segment.watch for segment in plan.segments] == [watch, watch, None, None]
    chosen = {(2048, size, None, "xla") for size in (32, 64, 128, 256, 512)}
    assert set(plan.programs) == {(2048, 128, watch, "xla")} | chosen
    longer = make_plan(model, 1, 5 * 2048, as_policy("corey-default")).programs
    assert set(longer) == chosen | {(2048, size, watch, "xla") for size in (32, 64, 128, 256, 512)}


def test_what_a_statistic_cannot_choose_for_is_read_as_without_a_policy():
    model = Model(MODEL.config, "float32", "gpu", "Unknown Device")
    short = make_plan(model, 1, LAG * 2048, as_policy("corey-default"))
    assert short.candidates == {}
    assert short.programs == make_plan(model, 1, LAG * 2048).programs == ((2048, 128, None, "xla"),)


@pytest.mark.usefixtures("measured")
def test_a_careful_policy_takes_only_what_was_measured_to_cost_next_to_nothing():
    policy = as_policy("careful:corey-default")
    assert isinstance(policy, Careful)
    assert choices(MODEL, 1).near_best == {16: (16,), 64: (32, 64), 512: (64, 256)}
    plan = make_plan(MODEL, 1, 1616, policy)
    assert plan.candidates == {512: (64, 256), 64: (32, 64), 16: (16,)}
    for entropy, chunk in ((0.0, 64), (5.5, 256)):
        (decision,) = decide(MODEL, 1, policy, 1616, np.array([[entropy, 0.0]]), 2, 512)
        assert (decision.chunk, decision.policy) == (chunk, "careful:corey-default")


def test_rules_may_look_at_layers_and_statistics():
    table = LearnedTable((Rule(32, layer_max=0), Rule(64, entropy_max=2.0), Rule(128, variance_min=9.0)), 256)
    model = Model(tiny_config("mamba2", n_layer=2), "float32", "gpu", "Unknown Device")
    watch = planning.watch_for(table)
    assert watch is not None
    assert watch.with_variance
    for statistics, wanted in (([1.0, 0.0], 64), ([3.0, 10.0], 128), ([3.0, 1.0], 256)):
        decisions = decide(model, 1, table, 5000, np.array([statistics]), 2, 2048)
        assert [decision.chunk for decision in decisions] == [32, wanted]
    assert planning.watch_for(PerLayer((64, 32))) is None


@pytest.mark.parametrize("name", [None, "length", "random:3", "corey-default", "careful:entropy:sampled"])
def test_the_programs_for_a_range_are_those_of_all_its_plans(name):
    model, policy = Model(MODEL.config, "float32", "gpu", "Unknown Device"), as_policy(name)
    found = programs_for(model, 1, 40, 7000, policy)
    assert set(found) == {one for length in range(40, 7001) for one in make_plan(model, 1, length, policy).programs}


def test_planning_costs_microseconds_a_request():
    model = Model(MODEL.config, "float32", "cpu", "cpu")
    make_plan(model, 1, 1)
    start = time.perf_counter()
    for length in range(1, 2001):
        make_plan(model, 1, length)
    assert (time.perf_counter() - start) / 2000 < 500e-6  # some 30 on an idle machine


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((kind, policy) for kind in ("mamba1", "mamba2") for policy in ("layers:16,64", "corey-default")),
        ("mamba1", "static:16"),
        ("mamba1", "random:1"),
        ("mamba2", "length"),
        ("mamba2", "entropy:token"),
    ],
)
def test_no_policy_changes_tokens(kind, policy):
    params = tiny_params(kind)
    prompts = [[1, 2, 3] * 40, (list(range(1, 100)) * 43)[: 2 * 2048 + 64], [7]]  # as many segments as policies need
    plain = mamba_jax.generate(params, prompts, max_new_tokens=12, logprobs=True)
    other = mamba_jax.generate(params, prompts, max_new_tokens=12, logprobs=True, policy=policy)
    for one, two in zip(plain, other, strict=True):
        assert one.tokens == two.tokens
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)
    decided = other[0].decisions
    assert {decision.policy for decision in decided} <= {policy, "measured"}
    assert any(decision.policy == policy for decision in decided)
    if policy in ("corey-default", "entropy:token"):
        assert all(decision.statistic is not None for decision in decided if decision.policy == policy)


def test_a_statistic_sees_the_text_it_is_of():
    params = tiny_params("mamba2")
    same = [5] * 3 * 2048
    mixed = np.random.default_rng(0).integers(0, 100, 3 * 2048)
    entropies = [
        mamba_jax.generate(params, text, max_new_tokens=0, policy="corey-default").decisions[-1].statistic
        for text in (same, mixed)
    ]
    assert 0 < entropies[0] < entropies[1]


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    [
        (1, 2**26 + 1, "length: got 67108865, wanted an integer from 1 to 67108864"),
        (1, 10**12, "length: got"),
        (1, 1.0, "length: got"),
        (1, True, "length: got True"),
        (2**16 + 1, 1, "batch: got 65537, wanted an integer from 1 to 65536"),
        (10**400, 1, "batch: got"),
    ],
)
def test_what_cannot_be_planned_is_named(batch, length, message):
    make_plan(MODEL, 1, 1)
    with pytest.raises(ValueError, match=message):
        make_plan(MODEL, batch, length)


def test_a_policy_plans_no_more_lengths_than_a_minute_allows():
    for low, high in ((1, 2**20), (2**26 - 200, 2**26)):
        with pytest.raises(ValueError, match=f"lengths: got {low} to {high}.* 'length', wanted no more than"):
            programs_for(MODEL, 1, low, high, as_policy("length"))
    assert programs_for(MODEL, 1, 10**6, 10**6, as_policy("length"))


def test_numpy_integers_are_planned_like_pythons():
    assert make_plan(MODEL, np.int64(3), np.int32(50)) == make_plan(MODEL, 3, 50)


@pytest.mark.parametrize("policy", [5, True, object(), ["length"]])
def test_what_is_no_policy_is_named(policy):
    with pytest.raises(ValueError, match="policy: got"):
        as_policy(policy)


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="policy: got 'fastest', wanted one of"):
        mamba_jax.generate(tiny_params("mamba2"), [1, 2], max_new_tokens=1, policy="fastest")


def test_the_rule_covers_every_platform():
    for platform in ("cpu", "gpu", "tpu"):
        for layer in ("mamba1", "mamba2"):
            assert default_chunk_size(platform, layer, 512) <= 512


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_text_fixes_a_chunk_size_a_layer_from_that_layers_own_statistic(kind):
    params, text = tiny_params(kind, n_layer=2), [1, 5, 9] * 704  # 2048 and 64 tokens
    policy = mamba_jax.fix_layers(params, text, "entropy:histogram")
    rule = as_policy("entropy:histogram")
    read = hidden_states(
        params, np.array([text[:2048]]), None, chunk_size=64, watch=planning.Watch(rule.estimator, every=1)
    )
    for i, chunk in enumerate(policy.chunks):  # the rest of the text changes little
        assert chunk == rule.choose(len(text), i, {"entropy": float(read.statistics[i, 0])}).chunk
    plain = mamba_jax.generate(params, text, max_new_tokens=8)
    fixed = mamba_jax.generate(params, text, max_new_tokens=8, policy=policy.name)
    assert plain.tokens == fixed.tokens
    assert fixed.decisions[0].policy == policy.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], "length"), "policy: got 'length', wanted one that"),
        (([[1], [2]], "entropy"), "text: got a list"),
    ],
)
def test_what_cannot_fix_layers_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        mamba_jax.fix_layers(tiny_params("mamba2"), *arguments)


def test_calibration_takes_the_chunk_sizes_of_a_length_one_after_the_other_in_another_order_each_round():
    specs = [Spec("prefill", 1, length, size) for length in (64, 128, 256) for size in (16, 32, 64)]
    order = _turns(specs, rounds=4)
    rounds = [order[start : start + len(specs)] for start in range(0, len(order), len(specs))]
    assert len(rounds) == 4
    assert all(sorted(each) == sorted(specs) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 4
    for each in rounds:
        assert len([length for length, _ in itertools.groupby(spec.length for spec in each)]) == 3


KERNEL_MODEL = Model(
    tiny_config("mamba2", d_inner=256, d_model=256, d_state=64, headdim=64, vocab_size=64), "bfloat16", "gpu", "Kernels"
)


@pytest.fixture
def kernels_measured(tmp_path, monkeypatch):
    """Kernels are faster at 64 positions and slower at 16; at 512 XLA's ops were not measured."""
    monkeypatch.setenv("MAMBA_JAX_CACHE", str(tmp_path))
    timings = [Timing(16, 16, (1.0,)), Timing(64, 16, (3.0,)), Timing(64, 32, (2.0,))]
    timings += [Timing(length, 0, (s,), None, "pallas") for length, s in ((16, 1.5), (64, 1.75), (512, 9.0))]
    shape = planning.shape_of(KERNEL_MODEL, 1)
    write_calibration(Calibration(KERNEL_MODEL.device, shape, "0.11.2", "2026-01-01", tuple(timings)))
    planning.forget_choices()
    yield
    monkeypatch.undo()
    planning.forget_choices()


def ran_by(plan):
    return [(segment.length, segment.implementation, segment.seconds) for segment in plan.segments]


@pytest.mark.usefixtures("kernels_measured")
def test_tables_choose_the_implementation_with_the_chunk_size():
    plan = make_plan(KERNEL_MODEL, 1, 590)
    assert ran_by(plan) == [(512, "pallas", 9.0), (64, "pallas", 1.75), (16, "xla", 1.0)]
    assert [decision.implementation for segment in plan.segments for decision in segment.decisions] == [
        "pallas",
        "pallas",
        "xla",
    ]
    assert ran_by(make_plan(KERNEL_MODEL, 1, 80, implementation="xla")) == [(64, "xla", 2.0), (16, "xla", 1.0)]
    assert ran_by(make_plan(KERNEL_MODEL, 1, 80, implementation="pallas")) == [
        (64, "pallas", 1.75),
        (16, "pallas", 1.5),
    ]
    by_policy = make_plan(KERNEL_MODEL, 1, 80, as_policy("static:32"))
    assert {segment.implementation for segment in by_policy.segments} == {"xla"}


@pytest.mark.usefixtures("kernels_measured")
@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"devices": 2}])
def test_kernels_are_planned_only_where_they_take_the_model(change):
    model = dataclasses.replace(KERNEL_MODEL, **change)
    assert {segment.implementation for segment in make_plan(model, 1, 590).segments} == {"xla"}
    with pytest.raises(NotImplementedError, match="got 'pallas', but the kernels do not take"):
        make_plan(model, 1, 590, implementation="pallas")


@pytest.mark.parametrize("default", [(), ("cuda",)])
def test_where_nobody_measured_kernels_the_default_of_the_platform_decides(monkeypatch, default):
    monkeypatch.setattr(dispatch, "KERNELS_BY_DEFAULT", frozenset(default))
    planning.forget_choices()
    wanted = "pallas" if default else "xla"
    plan = make_plan(KERNEL_MODEL, 1, 590)
    assert {segment.implementation for segment in plan.segments} == {wanted}
    assert plan.seconds is None
    assert planning.decode_implementation(KERNEL_MODEL, 1) == wanted
    assert planning.decode_implementation(dataclasses.replace(KERNEL_MODEL, dtype="float32"), 1) == "xla"
    assert planning.decode_implementation(dataclasses.replace(KERNEL_MODEL, platform="cpu"), 1) == "xla"
    monkeypatch.undo()
    planning.forget_choices()


@pytest.mark.usefixtures("kernels_measured")
def test_a_range_of_lengths_wants_the_kernels_that_its_plans_run():
    found = programs_for(KERNEL_MODEL, 1, 1, 700)
    assert set(found) == {one for length in range(1, 701) for one in make_plan(KERNEL_MODEL, 1, length).programs}
    assert {(one.length, one.implementation) for one in found} == {(16, "xla"), (64, "pallas"), (512, "pallas")}


@pytest.mark.usefixtures("kernels_measured")
def test_programs_hold_kernels_where_the_plan_says_so_and_nowhere_else():
    params = jax.eval_shape(lambda: init_params(KERNEL_MODEL.config, jax.random.key(0), "bfloat16"))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE_DEVICE), params)
    for reading in make_plan(KERNEL_MODEL, 1, 80).programs:
        text = lower_shapes(params, Spec("prefill", 1, *reading), platform="cuda").as_text()
        assert ("mosaic_gpu" in text) == (reading.implementation == "pallas")
    for implementation in ("xla", "pallas"):
        text = lower_shapes(params, Spec("decode", 1, BLOCK, implementation=implementation), platform="cuda").as_text()
        assert ("mosaic_gpu" in text) == (implementation == "pallas")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"implementation": "triton"}, ValueError, "implementation: got 'triton', wanted None, 'xla' or 'pallas'"),
        ({"implementation": "pallas"}, NotImplementedError, "implementation: got 'pallas', but .* platform cpu"),
        ({"implementation": "pallas", "policy": "length"}, ValueError, "policy: got 'length' beside .*'pallas'"),
    ],
)
def test_an_implementation_that_cannot_be_had_is_named(arguments, error, message):
    params = tiny_params("mamba2")
    with pytest.raises(error, match=message):
        mamba_jax.generate(params, [1, 2, 3], max_new_tokens=2, **arguments)
    with pytest.raises(error, match=message):
        mamba_jax.perplexity(params, [1, 2, 3], **arguments)
    assert mamba_jax.generate(params, [1, 2, 3], max_new_tokens=2, implementation="xla").decoded_by == "xla"
