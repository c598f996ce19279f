"""How far this implementation is from another one, or from a recorded truth, on one model and one text.

Tolerances are those of "Compiler-First State Space Duality" (float32): Table 6 for hidden states (rtol 1e-5, atol 1e-4)
and logits (atol 2e-4), Table 5 for perplexities (0.0005). Other dtypes are reported without a verdict, for no two
implementations round alike.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from mamba_jax.arguments import as_path
from mamba_jax.checkpoints import save
from mamba_jax.checkpoints.files import read_json
from mamba_jax.checkpoints.safetensors_file import read_safetensors
from mamba_jax.generate import as_rows, generate
from mamba_jax.messages import some
from mamba_jax.models import forward
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params
from mamba_jax.perplexity import perplexity, windows
from mamba_jax.planning import decode_implementation, reading_implementation
from mamba_jax.programs import model_of, program_weights
from mamba_jax.text import Tokenizer

HIDDEN = {"rtol": 1e-5, "atol": 1e-4}
LOGITS = {"rtol": 0.0, "atol": 2e-4}
PERPLEXITY_ATOL = 5e-4
LENGTH = 512  # tokens whose states and logits are compared


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of our array from theirs.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: the same over theirs' largest magnitude.
        rtol: tolerated, relative to each of theirs.
        atol: tolerated besides.
        within: every entry is within both together.
    """

    max_abs: float
    max_rel: float
    rtol: float
    atol: float
    within: bool

    @classmethod
    def of(cls, ours: Any, theirs: Any, *, rtol: float, atol: float) -> "Difference":
        """Compare in float64; NaN is within nothing."""
        a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        if a.shape != b.shape:
            raise ValueError(f"theirs: got shape {b.shape}, wanted ours, {a.shape}")
        apart = np.abs(a - b)
        within = bool(np.all(apart <= atol + rtol * np.abs(b)))
        return cls(float(apart.max()), float(apart.max() / np.abs(b).max()), rtol, atol, within)


@dataclasses.dataclass(frozen=True)
class Parity:
    """A comparison; parts that the other side does not offer are None.

    Attributes:
        against: what with.
        dtype: of the weights.
        precision: of our products.
        tokens: compared.
        hidden: final hidden states, after the last norm.
        logits: those that the other side has.
        argmax_equal: share of positions whose likeliest token is the same.
        greedy_equal: continuations that are the same, and of how many.
        greedy_first_difference: position of the first new token that differs, over all continuations; None for none.
        perplexity: ours.
        their_perplexity: theirs.
        their_error: where a truth is known, how far the other implementation itself is from it: the largest absolute
            difference of its hidden states and of its logits.
        verdict: float32: whether everything compared is within the tolerances; None for other dtypes.
    """

    against: str
    dtype: str
    precision: str
    tokens: int
    hidden: Difference | None = None
    logits: Difference | None = None
    argmax_equal: float | None = None
    greedy_equal: tuple[int, int] | None = None
    greedy_first_difference: int | None = None
    perplexity: float | None = None
    their_perplexity: float | None = None
    their_error: tuple[float | None, float | None] | None = None
    verdict: bool | None = None


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What another implementation makes of a text.

    Attributes:
        against: its name.
        ids: (l,) the text.
        hidden: (l, d_model) final hidden states, or None.
        logits: (l, any number of the first ids) or None.
        argmax: (l,) or None.
        greedy: prompts and their greedy continuations.
        perplexity: of `text` in windows of 1024, stride 512, if it was asked for.
        their_error: as in `Parity`.
    """

    against: str
    ids: np.ndarray
    hidden: np.ndarray | None
    logits: np.ndarray | None
    argmax: np.ndarray | None
    greedy: Sequence[tuple[list[int], list[int]]] = ()
    perplexity: float | None = None
    their_error: tuple[float | None, float | None] | None = None


def against(
    params: Params,
    what: str,
    *,
    text: str | None = None,
    tokenizer: Tokenizer | str | None = None,
    implementation: Implementation | None = None,
) -> Parity:
    """Compare a model with another implementation.

    Args:
        params: the model.
        what: "transformers", "mamba_ssm", or the path of a safetensors file that `recorded` reads.
        text: a text to compare the perplexity of, and the states and logits of its first tokens; without one these are
            compared on random tokens.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        implementation: of scans and steps, as in `generate`.

    Raises:
        ImportError: if the other implementation is not installed.
        ValueError: if the file holds nothing to compare, or the model has no equal in the other implementation.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
        OSError: if the file cannot be read.
    """
    model = model_of(program_weights(params))
    reading_implementation(model, 1, None, implementation)  # raises if there is none
    decode_implementation(model, 1, implementation)
    ids, whole = default_ids(params, text, tokenizer)
    asked = whole if text is not None else None
    if what == "transformers":
        theirs = from_transformers(params, ids, default_prompts(ids), asked)
    elif what == "mamba_ssm":
        theirs = from_mamba_ssm(params, ids, default_prompts(ids), asked)
    else:
        theirs = recorded(as_path("what", what), params.dtype.name)
    return compare(params, theirs, asked, implementation)


def compare(
    params: Params,
    theirs: Outputs,
    text: Sequence[int] | None = None,
    implementation: Implementation | None = None,
) -> Parity:
    """Compare a model with what another implementation made of the same weights.

    Args:
        params: the model.
        theirs: the other's outputs.
        text: token ids to take the perplexity of, where theirs is known.
        implementation: of scans and steps, as in `generate`.
    """
    logits, states = forward(params, theirs.ids[None], output_hidden_states=True, implementation=implementation)
    ours, final = np.asarray(logits[0], np.float64), np.asarray(states[-1][0], np.float64)
    hidden = None if theirs.hidden is None else Difference.of(final, theirs.hidden, **HIDDEN)
    found = None
    if theirs.logits is not None:
        found = Difference.of(ours[:, : theirs.logits.shape[1]], theirs.logits, **LOGITS)
    agree = None if theirs.argmax is None else float(np.mean(ours.argmax(-1) == theirs.argmax))
    equal, first = _compare_greedy(params, theirs.greedy, implementation)
    both = text is not None and theirs.perplexity is not None
    mine = perplexity(params, text, implementation=implementation).perplexity if both and text is not None else None
    checks = [part.within for part in (hidden, found) if part is not None]
    checks += [] if equal is None else [equal[0] == equal[1]]
    if mine is not None and theirs.perplexity is not None:
        checks.append(abs(mine - theirs.perplexity) <= PERPLEXITY_ATOL)
    return Parity(
        against=theirs.against,
        dtype=params.dtype.name,
        precision="highest" if params.dtype.name == "float32" else f"{params.dtype.name}, summed in float32",
        tokens=len(theirs.ids),
        hidden=hidden,
        logits=found,
        argmax_equal=agree,
        greedy_equal=equal,
        greedy_first_difference=first,
        perplexity=mine,
        their_perplexity=theirs.perplexity if both else None,
        their_error=theirs.their_error,
        verdict=all(checks) if params.dtype.name == "float32" and checks else None,
    )


def _compare_greedy(
    params: Params, cases: Sequence[tuple[list[int], list[int]]], implementation: Implementation | None
) -> tuple[tuple[int, int] | None, int | None]:
    if not cases:
        return None, None
    options: dict[str, Any] = {"max_new_tokens": max(len(new) for _, new in cases), "stop_token_ids": []}
    prompts = [prompt for prompt, _ in cases]
    together = [[prompt] for prompt in prompts] if implementation == "pallas" else [prompts]  # kernels step few rows
    results: list[Any] = []
    for some_prompts in together:
        found: Any = generate(params, some_prompts, implementation=implementation, **options)
        results += found
    firsts = []
    for result, (_, new) in zip(results, cases, strict=True):
        apart = [i for i, (a, b) in enumerate(zip(result.tokens, new, strict=False)) if a != b]
        firsts += apart[:1]
    return (len(cases) - len(firsts), len(cases)), min(firsts, default=None)


def recorded(file: Path, dtype: str) -> Outputs:
    """Outputs recorded in a safetensors file.

    Its tensors: "ids"; "truth_hidden" or "last_hidden"; "truth_logits*" or "logits*", the first ids' logits;
    "truth_argmax" or "argmax". The truth goes before another implementation's figures, whose own distance from it is
    then reported; for bfloat16 "logits*_bf16" is that implementation's. Beside it may stand "greedy_fp32.json"
    (prompts and continuations) and "reference.json" ("ppl_fp32_valid", "ppl_bf16_valid").

    Args:
        file: the file.
        dtype: of our weights.

    Raises:
        ValueError: if the file is no safetensors, has no ids, or nothing to compare.
        OSError: if it cannot be read.
    """
    tensors = {name: tensor.map() for name, tensor in read_safetensors(file).items()}
    if "ids" not in tensors:
        raise ValueError(f"{file}: got tensors {some(sorted(tensors)) or 'none'}, wanted 'ids' among them")
    half = "_bf16" if dtype == "bfloat16" else ""
    hidden, last = tensors.get("truth_hidden"), tensors.get("last_hidden")
    truth = _first(tensors, "truth_logits", "")
    other = _first(tensors, "logits", half)
    error = None
    if truth is not None and other is not None and hidden is not None and last is not None:
        states = None if half else float(np.abs(last - hidden).max())
        error = (states, float(np.abs(other - truth).max()))
    greedy: list[tuple[list[int], list[int]]] = []
    beside = file.parent / "greedy_fp32.json"
    facts = file.parent / "reference.json"
    try:
        if dtype == "float32" and beside.is_file():
            greedy = [(case["prompt"], case["new"]) for case in read_json(beside).values()]
        known = read_json(facts).get("ppl_bf16_valid" if half else "ppl_fp32_valid") if facts.is_file() else None
        theirs = None if known is None else float(known[0])
    except (TypeError, KeyError, IndexError) as problem:
        names = f"{beside.name} and {facts.name}"
        raise ValueError(
            f"{names} beside {file}: got something else than what `recorded` reads: {problem!r}"
        ) from problem
    found = Outputs(
        against=str(file),
        ids=tensors["ids"],
        hidden=hidden if hidden is not None else last,
        logits=truth if truth is not None else other,
        argmax=tensors.get("truth_argmax", tensors.get("argmax")),
        greedy=greedy,
        perplexity=theirs,
        their_error=error,
    )
    if found.argmax is not None and found.argmax.shape != found.ids.shape:
        raise ValueError(f"{file}: argmax: got shape {found.argmax.shape}, wanted that of ids, {found.ids.shape}")
    if found.hidden is None and found.logits is None and found.argmax is None:
        raise ValueError(
            f"{file}: got tensors {some(sorted(tensors)) or 'none'}, wanted hidden states, logits or argmax among them"
        )
    return found


def _first(tensors: dict[str, np.ndarray], beginning: str, end: str) -> np.ndarray | None:
    names = (name for name in sorted(tensors) if name.startswith(beginning) and name.endswith(end))
    return next((tensors[name] for name in names if end or not name.endswith("_bf16")), None)


def from_transformers(params: Params, ids: np.ndarray, prompts: Sequence[list[int]], text: list[int] | None) -> Outputs:
    """What transformers' torch implementation makes of the same weights, on the CPU.

    Args:
        params: the model; it is written to a temporary folder in Hugging Face's layout.
        ids: (l,) the text to compare on.
        prompts: to continue greedily, by 32 tokens.
        text: to take the perplexity of, or None.

    Raises:
        ImportError: without torch (extra `parity`).
        ValueError: if the model has no equal in transformers.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError("comparing with transformers needs torch: pip install 'mamba-jax[parity]'") from error
    with tempfile.TemporaryDirectory() as folder:
        save(params, folder, layout="hf")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, params.dtype.name))
    model.eval()
    with torch.inference_mode():

        def logits_of(tokens: Sequence[int]) -> Any:
            return model(torch.tensor([list(tokens)])).logits[0].to(torch.float64)

        read = model(torch.tensor(ids[None].astype(np.int64)), output_hidden_states=True)
        logits = read.logits[0].to(torch.float64).numpy()
        greedy = []
        for prompt in prompts:
            new = model.generate(
                torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
            )
            greedy.append((prompt, new[0, len(prompt) :].tolist()))
        theirs = None if text is None else float(np.exp(-np.mean(np.concatenate(list(_logprobs(logits_of, text))))))
    return Outputs(
        against=f"transformers {transformers.__version__}",
        ids=ids,
        hidden=read.hidden_states[-1][0].to(torch.float64).numpy(),
        logits=logits,
        argmax=logits.argmax(-1),
        greedy=greedy,
        perplexity=theirs,
    )


def from_mamba_ssm(params: Params, ids: np.ndarray, prompts: Sequence[list[int]], text: list[int] | None) -> Outputs:
    """What mamba_ssm makes of the same weights, on an NVIDIA GPU; arguments as in `from_transformers`.

    Raises:
        ImportError: without mamba_ssm.
        ValueError: if the model has no equal in mamba_ssm.
    """
    try:
        import mamba_ssm
        import torch
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    except ImportError as error:
        raise ImportError("comparing with mamba_ssm needs it installed, and an NVIDIA GPU") from error
    with tempfile.TemporaryDirectory() as folder:
        save(params, folder, layout="original")
        weights = load_file(Path(folder) / "model.safetensors")
        torch.save({name: torch.from_numpy(value) for name, value in weights.items()}, f"{folder}/pytorch_model.bin")
        model: Any = MambaLMHeadModel.from_pretrained(folder, device="cuda", dtype=getattr(torch, params.dtype.name))
    model.eval()
    with torch.inference_mode():

        def logits_of(tokens: Sequence[int]) -> Any:
            return model(torch.tensor([list(tokens)], device="cuda")).logits[0].to("cpu", torch.float64)

        hidden = model.backbone(torch.tensor(ids[None].astype(np.int64), device="cuda"))[0]
        logits = logits_of(ids.tolist()).numpy()
        greedy = []
        for prompt in prompts:
            start = torch.tensor([prompt], device="cuda")
            new = model.generate(input_ids=start, max_length=len(prompt) + 32, top_k=1)
            greedy.append((prompt, new[0, len(prompt) :].tolist()))
        theirs = None if text is None else float(np.exp(-np.mean(np.concatenate(list(_logprobs(logits_of, text))))))
    return Outputs(
        against=f"mamba_ssm {mamba_ssm.__version__}",
        ids=ids,
        hidden=hidden.to("cpu", torch.float64).numpy(),
        logits=logits,
        argmax=logits.argmax(-1),
        greedy=greedy,
        perplexity=theirs,
    )


def _logprobs(logits_of: Callable[[Sequence[int]], Any], text: Sequence[int]) -> Iterator[np.ndarray]:
    for begin, end, count in windows(len(text), 1024, 512):
        tokens = text[begin:end]
        logprobs = logits_of(tokens).log_softmax(-1)[range(len(tokens) - 1), list(tokens[1:])]
        yield logprobs.numpy()[len(tokens) - 1 - count :]


def default_ids(params: Params, text: str | None, tokenizer: Tokenizer | str | None) -> tuple[np.ndarray, list[int]]:
    """Ids to compare on, the first `LENGTH` of a text or random ones, and the whole text's."""
    if text is None:
        ids = np.random.default_rng(0).integers(0, params.config.vocab_size, LENGTH, np.int32)
        return ids, ids.tolist()
    rows, _, _ = as_rows(params, text, tokenizer, "text")
    if not text or len(rows[0]) < 2:
        raise ValueError(f"text: got {text!r:.80}, wanted one of at least two tokens")
    return np.array(rows[0][:LENGTH], np.int32), rows[0]


def default_prompts(ids: np.ndarray) -> list[list[int]]:
    """Prompts to continue greedily: beginnings of a text, of unequal lengths."""
    return [ids[:length].tolist() for length in (1, 7, 64, 200) if length <= len(ids)]
