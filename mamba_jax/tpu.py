"""Compiling for TPUs on a machine that has none, and what the compiled program says of itself.

The compiler is libtpu's (extra `tpu-aot`); weights are shapes, and nothing is allocated. What is made of a program here
is computed from it and from a chip's data sheet, never measured: a bound on its time is

    max(FLOPs / FLOPs a second, bytes / bytes a second)

FLOPs are those of the compiler's cost analysis, in which a kernel counts what it declares and the body of a loop counts
once. Its bytes count a weight three times that is fetched into VMEM ahead of its use; so bytes are read from the
program's text: every array in HBM that an instruction reads or writes.
"""

import importlib.util
import math
import os
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from mamba_jax.cache import init_cache
from mamba_jax.config import MambaConfig
from mamba_jax.params import Params, param_shapes


class Chip(NamedTuple):
    """A data sheet, of what JAX takes for one device."""

    flops: float  # a second, bfloat16
    bandwidth: float  # bytes a second
    memory: float  # bytes


GB = 1e9
CHIPS = {
    "v5e": Chip(197e12, 819e9, 16 * GB),
    "v5p": Chip(459e12, 2765e9, 95 * GB),
    "v6e": Chip(918e12, 1640e9, 32 * GB),
    "v7x": Chip(2307e12 / 2, 7380e9 / 2, 192 * GB / 2),  # a chip of two cores is two devices
}
ONE_CHIP = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "v7x": "v7x:1x1x1"}
# What libtpu is told where there is no TPU: not to ask the network which one this is, nor to say that it is not known;
# several processes may compile, since none holds a TPU.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "after-all", "iota"}
_SLICES = {"slice", "dynamic-slice", "gather"}


def have_compiler() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def check_topology(topology: str) -> None:
    """Raise a `ValueError` unless a topology's chip is known and its size is written as such."""
    chip, _, size = topology.partition(":")
    if chip not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", size, re.ASCII):
        wanted = f"one such as {', '.join(ONE_CHIP.values())} or v6e:2x2"
        raise ValueError(f"topology: got {topology!r:.80}, wanted {wanted}")


def topology_devices(topology: str) -> list[Any]:
    """Devices of a topology, to compile for: "v6e:1x1", "v5p:1x1x1", "v7x:1x1x1", "v6e:1x2".

    Raises:
        ValueError: if the compiler knows no such topology.
        ImportError: if there is no compiler.
    """
    check_topology(topology)
    if not have_compiler():
        raise ImportError('no libtpu to compile for TPUs with: pip install "mamba-jax[tpu-aot]"')
    from jax.experimental import topologies

    for name, value in LIBTPU.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.replace("v7x", "tpu7x"))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology: got {topology!r}: {str(error).splitlines()[0]}") from error
    return list(found.devices)


def abstract_params(config: MambaConfig, dtype: DTypeLike, device: Any) -> Params:
    """A model's shapes on a device, as `programs.lower_shapes` takes them."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), param_shapes(config, dtype)
    )


class Cost(NamedTuple):
    """What a compiled program says of itself; bytes, and seconds where the chip does nothing else."""

    flops: float  # of a decode program: a token's
    hbm_bytes: float  # the same
    kernels: int
    arguments: int
    aliased: int  # of the arguments: updated in place
    temporaries: int
    code: int
    peak: int  # weights, cache, temporaries and code together
    fits: bool
    seconds: float
    bound: str  # "compute" or "memory"
    collectives: dict[str, int]


def cost_of(compiled: jax.stages.Compiled, chip: Chip) -> Cost:
    """Read a program; of one with a loop that has no fixed count, as a decode program's, its body alone."""
    text = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    analysis: Any = compiled.cost_analysis()
    flops, moved = float(analysis["flops"]), memory_traffic(text)
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    compute, fetch = flops / chip.flops, moved / chip.bandwidth
    return Cost(
        flops=flops,
        hbm_bytes=moved,
        kernels=kernels(text),
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        peak=peak,
        fits=peak <= chip.memory,
        seconds=max(compute, fetch),
        bound="compute" if compute > fetch else "memory",
        collectives=collectives(text),
    )


def decode_bytes(config: MambaConfig, dtype: DTypeLike, batch: int = 1) -> int:
    """Bytes that a token cannot do without: each weight read, states and windows read and written."""
    shapes = param_shapes(config, dtype)
    weights = sum(_nbytes(leaf) for leaf in jax.tree.leaves(shapes))
    if shapes.lm_head is not None:
        weights -= _nbytes(shapes.embedding)  # of which a row is read
    cache = jax.eval_shape(lambda: init_cache(config, batch, dtype))
    return weights + 2 * sum(_nbytes(leaf) for leaf in jax.tree.leaves(cache))


def prefill_flops(config: MambaConfig, batch: int, length: int, chunk_size: int) -> float:
    """FLOPs of the algorithm: its matrix products, the convolution and the scan; logits of the last position only."""
    c, d, n = config, config.d_inner, config.d_state
    products = c.d_model * (c.in_proj_width + d)
    if c.layer == "mamba1":
        products += d * (2 * c.dt_rank + 2 * n)
        scan = 6 * d * n
    else:
        q = min(chunk_size, length)
        scan = 2 * (c.ngroups * q * n + c.nheads * c.headdim * (q + 2 * n))
    layer = 2 * products + 2 * c.d_conv * c.conv_channels + scan
    return float(batch * (length * c.n_layer * layer + 2 * c.d_model * c.padded_vocab_size))


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def kernels(text: str) -> int:
    """How many calls of kernels a compiled program holds."""
    return text.count('custom_call_target="tpu_custom_call"')


def collectives(text: str) -> dict[str, int]:
    """How many of each kind of exchange between devices a compiled program holds."""
    found = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    return dict(sorted(found.items()))


class _Instruction(NamedTuple):
    kind: str
    types: list[str]  # of what it gives: elements of a tuple
    operands: list[str]  # names; of a parameter its number, of a constant its value
    rest: str
    root: bool


_Computation = dict[str, _Instruction]


def memory_traffic(text: str) -> float:
    """Bytes that a compiled program's instructions read from and write to HBM.

    A loop counts as often as it runs. One whose end is not a constant is that of a decode program: its body alone is
    counted, once.
    """
    computations, entry = _parse(text)
    loops = [one for body in computations.values() for one in body.values() if one.kind == "while"]
    open_ended = [_named(one, "body") for one in loops if _turns(computations, one) is None]
    return max(_traffic(computations, name) for name in open_ended or [entry])


def _turns(computations: dict[str, _Computation], loop: _Instruction) -> int | None:
    """How often a loop runs that counts up to a constant; None of another."""
    condition = computations[_named(loop, "condition")]
    end = next(one for one in condition.values() if one.root)
    limits = [condition[name] for name in end.operands if condition[name].kind == "constant"]
    return int(limits[0].operands[0]) if end.kind == "compare" and "=LT" in end.rest and limits else None


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Computations by name, and the name of the entry."""
    computations: dict[str, _Computation] = {}
    body: _Computation = {}
    entry = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
            body = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif found := re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*)", line):
            rest = found[3]
            end = _closing(rest) if rest.startswith("(") else rest.find(" ")
            types = _elements(rest[1 : end - 1]) if rest.startswith("(") else [rest[:end]]
            kind, _, tail = rest[end:].strip().partition("(")
            close = _closing("(" + tail) - 2
            operands = re.findall(r"%([\w.\-]+)", tail[:close]) or [tail[:close]][: kind in ("parameter", "constant")]
            body[found[2]] = _Instruction(kind, types, operands, tail[close:], bool(found[1]))
    return computations, entry


def _closing(text: str) -> int:
    """Where what stands in the bracket that opens a text ends."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            return i + 1
    return len(text)


def _elements(text: str) -> list[str]:
    """The parts of a tuple, which may be tuples."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _named(one: _Instruction, attribute: str) -> str:
    found = re.search(rf"{attribute}=%([\w.\-]+)", one.rest)
    return found[1] if found else ""


def _size(types: list[str], hbm: bool = True) -> int:
    """Bytes of arrays; with `hbm`, of those that lie in HBM and not in a memory of the chip."""
    return sum(
        math.prod(int(dim) for dim in dims.split(",") if dim) * _BYTES[dtype]
        for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", " ".join(types))
        if dtype in _BYTES and not (hbm and "S(" in layout)
    )


def _traffic(computations: dict[str, _Computation], name: str) -> float:
    body, total = computations[name], 0.0
    for one in body.values():
        given = {operand: body[operand].types for operand in one.operands if operand in body}
        if one.kind == "while":
            total += (_turns(computations, one) or 1) * _traffic(computations, _named(one, "body"))
        elif one.kind == "conditional":
            branches = re.search(r"branch_computations=\{(.*?)\}", one.rest)
            names = re.findall(r"%([\w.\-]+)", branches[1] if branches else one.rest)
            total += max((_traffic(computations, branch) for branch in names if branch in computations), default=0.0)
        elif one.kind in ("copy-start", "slice-start"):  # ahead of its use, to another memory
            arrives = one.types[one.kind == "slice-start"]
            sides = (_size(types) > 0 for types in (*given.values(), [arrives]))
            total += sum(sides) * _size([arrives], hbm=False)
        elif one.kind == "fusion":
            operands = [body[operand].types for operand in one.operands]
            total += _fusion_traffic(computations, one, operands)
        elif one.kind in _SLICES or (one.kind == "dynamic-update-slice"):
            part = one.types if one.kind in _SLICES else body[one.operands[1]].types
            total += sum(_size(types) > 0 for types in (given[one.operands[0]], one.types)) * _size(part, hbm=False)
        elif one.kind not in _FREE and not one.kind.endswith("-done") and "Bitcast" not in one.rest:
            total += _size(one.types) + sum(map(_size, given.values()))
    return total


def _fusion_traffic(computations: dict[str, _Computation], one: _Instruction, given: list[list[str]]) -> float:
    """What a fusion reads and writes: of an operand that it only slices, the slices; of one that it updates, these."""
    body, total = computations[_named(one, "calls")], 0.0
    root = next(inner for inner in body.values() if inner.root)
    update = body[root.operands[1]].types if root.kind == "dynamic-update-slice" else None
    for name, types in zip(_parameters(body), given, strict=False):
        if _size(types) and (update is None or name != root.operands[0]):
            total += min(_size(types), _read(computations, body, name))
    if update is not None:
        return total + (_size(update, hbm=False) if _size(one.types) else 0)
    return total + _size(one.types)


def _parameters(body: _Computation) -> list[str]:
    numbers = {int(inner.operands[0]): name for name, inner in body.items() if inner.kind == "parameter"}
    return [numbers.get(i, "") for i in range(max(numbers, default=-1) + 1)]


def _read(computations: dict[str, _Computation], body: _Computation, name: str) -> float:
    """Bytes of a value that a computation reads; infinite if it does not only slice it."""
    total = math.inf if body[name].root else 0.0
    for user_name, user in body.items():
        if name in user.operands:
            if user.kind in _SLICES:
                total += _size(user.types, hbm=False)
            elif user.kind == "bitcast":
                total += _read(computations, body, user_name)
            elif user.kind == "fusion":
                inner = computations[_named(user, "calls")]
                named = zip(_parameters(inner), user.operands, strict=False)
                total += sum(_read(computations, inner, own) for own, operand in named if operand == name)
            else:
                return math.inf
    return total
