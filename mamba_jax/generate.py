"""Text from a model: prompts in, `Generation`s or a stream of text out.

The prompt is read segment by segment, then one compiled loop on the device samples and steps until every row has
finished (`mamba_jax.programs`). Everything here is bookkeeping around those calls.
"""

import collections
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Literal, cast

import jax
import numpy as np

from mamba_jax import text as text_lib
from mamba_jax.arguments import BYTES, as_array, as_integer, as_integers, is_integer
from mamba_jax.cache import MambaCache
from mamba_jax.ops.dispatch import Implementation
from mamba_jax.params import Params, check_params
from mamba_jax.planning import as_policy, decode_implementation, make_plan, reading_implementation
from mamba_jax.programs import (
    BLOCK,
    DecodeOptions,
    DecodeState,
    Spec,
    compile_programs,
    model_of,
    program,
    program_weights,
    read_prompts,
    reading_specs,
)
from mamba_jax.progress import track
from mamba_jax.sampling import Sampler, row_keys
from mamba_jax.scheduler.policies import Decision, Policy
from mamba_jax.scheduler.segments import LONGEST_TEXT, batch_bucket
from mamba_jax.text import TextDecoder, Tokenizer

TEXT_BLOCK = 16  # tokens between two looks at the text, for streaming and stop strings

_TOKENIZER = "pass the argument tokenizer (command line: --tokenizer PATH)"
_NOT_FINITE = "try dtype='float32', or check the weights"
_PROMPT = "wanted a string, token ids, or a list of either"

Prompt = str | Sequence[int]
Mode = Literal["device", "host", "recompute"]
Block = tuple[np.ndarray, np.ndarray, DecodeState]  # (b, n) tokens, -1: none; (b, n) log-probabilities; state after


@dataclasses.dataclass(frozen=True)
class Generation:
    """One continuation.

    Attributes:
        tokens: the new ids, the one that ended the text included.
        text: the new text without the stop token or stop string; None where there is no tokenizer.
        logprobs: log-probability of each new id under the model, before any sampling option; None unless asked for.
        finish_reason: "stop" (a stop token or stop string) or "length".
        timings: seconds spent by the whole batch under "compile_s", "prefill_s" and "decode_s", and the tokens it
            generated a second while decoding under "tokens_per_s".
        decisions: about the chunk sizes that the whole batch was read with, and what ran them, segment by segment.
        decoded_by: the implementation of the steps.
        cache: this row's cache after its last token, batch 1; None unless asked for.
        next_logits: (v,) float32 logits that follow the last token; None unless asked for.
    """

    tokens: list[int]
    text: str | None
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    timings: dict[str, float]
    decisions: tuple[Decision, ...] = dataclasses.field(default=(), repr=False)
    decoded_by: Implementation = "xla"
    cache: MambaCache | None = dataclasses.field(default=None, repr=False)
    next_logits: jax.Array | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a request may choose about its continuation; `generate` says what each means."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] = 0
    stop_token_ids: Sequence[int] | Set[int] | None = None
    stop: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        as_integer("max_new_tokens", self.max_new_tokens, 0, LONGEST_TEXT)


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts as ids and options as the programs take them.

    Attributes:
        weights: the model as programs take it.
        rows: prompt ids, each row at least one.
        max_new_tokens: most tokens to generate.
        stop_ids: ids that end a row.
        stop: strings that end a row.
        tokenizer: for the text, if there is one.
        policy: decides the chunk sizes of reading; None takes the fastest measured ones.
        implementation: of reading; None leaves it to the plan.
        decoded_by: the implementation of the steps.
        on_device: the options that the decode program reads.
    """

    weights: Params
    rows: list[list[int]]
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop: tuple[str, ...]
    tokenizer: Tokenizer | None
    policy: Policy | None
    implementation: Implementation | None
    decoded_by: Implementation
    on_device: DecodeOptions

    @property
    def batch(self) -> int:
        """Rows that programs run, dummy ones included."""
        return batch_bucket(len(self.rows))


def generate(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | Set[int] | None = None,
    stop: str | Iterable[str] | None = None,
    logprobs: bool = False,
    return_cache: bool = False,
    tokenizer: Tokenizer | str | None = None,
    policy: Policy | str | None = None,
    implementation: Implementation | None = None,
    mode: Mode = "device",
) -> Generation | list[Generation]:
    """Continue one prompt or several.

    In float32 each row of a batch equals that prompt run alone, and what a row samples depends on its seed and its own
    prompt only; in 16 bits up to rounding, which differs between one row and several. Base models repeat themselves
    for ever if they may: there is always a limit.

    Args:
        params: the model.
        prompt: a string, token ids, or a list of either with unequal lengths. Ids may come in any integer array that
            numpy can read. An empty prompt becomes the BOS token where the checkpoint names one.
        max_new_tokens: most tokens to generate, up to 2**26; 0 only reads the prompt.
        temperature: 0 takes the most likely token.
        top_k: sample among the k most likely tokens.
        top_p: sample among the fewest tokens whose probabilities sum to top_p.
        min_p: sample among tokens at least min_p times as likely as the most likely.
        repetition_penalty: above 1 makes tokens of the prompt and the continuation less likely.
        seed: of the sampling, one for all rows or one a row.
        stop_token_ids: ids that end a row; None takes the EOS ids of the checkpoint, or of the tokenizer where the
            checkpoint names none; [] turns them off.
        stop: string or strings that end a row. They are looked for in the text, which has no special tokens: an EOS
            such as "<|endoftext|>" belongs into stop_token_ids.
        logprobs: also return log-probabilities.
        return_cache: also return each row's cache and the logits that follow its last token; choose a token from these
            and go on with `step(params, [token], cache)`.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        policy: what decides the chunk sizes of reading the prompt: a policy, or a name that
            `mamba_jax.scheduler.policies.policy` knows. Speed only, never results. None takes the fastest measured. The
            chunk sizes are those of XLA's ops, so with a policy these read.
        implementation: "xla" takes XLA's ops; "pallas" reads and steps by the kernels for NVIDIA GPUs or TPUs, or
            raises. None reads by the faster of the two where both were measured (`calibrate`), and else leaves it to
            `ops.dispatch.KERNELS_BY_DEFAULT`. Speed, and rounding in 16 bits.
        mode: "device" (one compiled loop), "host" (a dispatch per token) or "recompute" (no cache: the whole text is
            read again for each token). The last two exist to be compared with the first; all give the same tokens.

    Returns:
        A `Generation` for a single prompt, a list of them for a list of prompts.

    Raises:
        ValueError: if an argument does not fit; the message names it.
        NotImplementedError: if implementation is "pallas" and the kernels do not take the model, batch or device.
        FloatingPointError: if the model's logits are not finite.
    """
    if mode not in ("device", "host", "recompute"):
        raise ValueError(f"mode: got {mode!r}, wanted 'device', 'host' or 'recompute'")
    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_token_ids=stop_token_ids,
        stop=stop,
    )
    rows, single, tokenizer = as_rows(params, prompt, tokenizer)
    request = make_request(params, rows, tokenizer, options, policy, implementation)
    results = _generate(request, mode, logprobs=logprobs, return_cache=return_cache)
    return results[0] if single else results


def stream(
    params: Params,
    prompt: Prompt,
    *,
    tokenizer: Tokenizer | str | None = None,
    policy: Policy | str | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Iterator[str]:
    """Continue one prompt, giving its text in pieces; joined they are `generate(params, prompt, ...).text`.

    Args:
        params: the model.
        prompt: a string or token ids.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        policy: as in `generate`.
        implementation: as in `generate`.
        **options: the fields of `Options`, as in `generate`.

    Returns:
        An iterator over pieces of text, none of them empty and none ending inside a character.

    Raises:
        ValueError: if an argument does not fit, or there is no tokenizer; before the first piece.
        NotImplementedError: as in `generate`; before the first piece.
    """
    if unknown := options.keys() - {field.name for field in dataclasses.fields(Options)}:
        raise ValueError(f"{', '.join(sorted(unknown))}: not an option of stream, which gives nothing but text")
    rows, single, tokenizer = as_rows(params, prompt, tokenizer)
    if not single:
        raise ValueError(f"prompt: got a list of {len(rows)} prompts, wanted a single one to stream")
    if tokenizer is None:
        raise ValueError(f"tokenizer: streaming text needs one, and the checkpoint has none beside it: {_TOKENIZER}")
    return _stream(make_request(params, rows, tokenizer, Options(**options), policy, implementation))


def as_rows(
    params: Params,
    prompt: Prompt | Sequence[Prompt],
    tokenizer: Tokenizer | str | os.PathLike[str] | None,
    name: str = "prompt",
) -> tuple[list[list[int]], bool, Tokenizer | None]:
    """Prompts as checked token ids, whether there was a single one, and the tokenizer if there is one.

    Args:
        params: the model.
        prompt: a string, token ids, or a list of either.
        tokenizer: one to use instead of the checkpoint's, or the folder of one.
        name: of the argument, for errors.
    """
    if not isinstance(params, Params):
        check_params(params)  # raises
    prompt = np.asarray(prompt) if isinstance(prompt, jax.Array) else as_array(prompt)
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, BYTES)
    if not listed and not (isinstance(prompt, np.ndarray) and prompt.ndim):
        raise ValueError(f"{name}: got {prompt!r:.80}, {_PROMPT}")
    single = isinstance(prompt, str) or (len(prompt) > 0 and is_integer(prompt[0]))
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise ValueError(f"{name}: got an empty list, {_PROMPT}")
    source = tokenizer if tokenizer is not None else params.text.tokenizer
    if isinstance(source, str | os.PathLike):
        source = text_lib.load_tokenizer(os.fspath(source))
    if source is not None and not (callable(source) and hasattr(source, "decode")):
        raise ValueError(f"tokenizer: got {source!r:.80}, wanted a transformers tokenizer, or the folder of one")
    return [_as_ids(params, item, source, name) for item in prompts], single, source


def _as_ids(params: Params, prompt: Any, tokenizer: Tokenizer | None, name: str) -> list[int]:
    ids: list[int] | None
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name}: got text, but the checkpoint has no tokenizer beside it: {_TOKENIZER}")
        ids = text_lib.encode(tokenizer, prompt, name)
    else:
        ids = None if isinstance(prompt, Set) else as_integers(prompt)
    if ids is None:
        raise ValueError(f"{name}: got {prompt!r:.80}, {_PROMPT}")
    if not ids:
        if params.text.bos_token_id is None:
            raise ValueError(
                f"{name}: got no token, wanted at least one (the checkpoint names no BOS token to begin with)"
            )
        ids = [params.text.bos_token_id]
    rows = params.config.padded_vocab_size
    if min(ids) < 0 or max(ids) >= rows:
        raise ValueError(f"{name}: got token ids from {min(ids)} to {max(ids)}, wanted 0 to {rows - 1}")
    return ids


def make_request(
    params: Params,
    rows: list[list[int]],
    tokenizer: Tokenizer | None,
    options: Options,
    policy: Policy | str | None = None,
    implementation: Implementation | None = None,
) -> Request:
    """Check the options against the model and put them into the form that the programs take."""
    stop = text_lib.StopStrings(() if options.stop is None else options.stop).wanted
    if stop and tokenizer is None:
        raise ValueError(f"stop: stop strings need a tokenizer, and the checkpoint has none beside it: {_TOKENIZER}")
    batch, vocab = batch_bucket(len(rows)), params.config.padded_vocab_size
    name, asked = ("stop_token_ids", options.stop_token_ids)
    if asked is None:
        name, asked = _eos_ids(params, tokenizer)
    stop_ids = as_integers(asked)
    if stop_ids is None or not all(0 <= i < vocab for i in stop_ids):
        raise ValueError(f"{name}: got {asked!r:.80}, wanted a list of ids from 0 to {vocab - 1}")
    stop_mask = np.zeros(vocab, bool)
    stop_mask[stop_ids] = True
    valid = params.config.vocab_size
    if tokenizer is not None:
        valid = min(valid, text_lib.vocab_size(tokenizer))
    sampler = Sampler.of(
        batch,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    keys = np.zeros((batch, 2), np.uint32)
    keys[: len(rows)] = row_keys(options.seed, len(rows))
    sampling = bool((sampler.temperature > 0).any() or (sampler.repetition_penalty != 1).any())
    weights, chosen = program_weights(params), as_policy(policy, params.config.n_layer)
    model = model_of(weights)
    reading_implementation(model, batch, chosen, implementation)  # raises if there is none
    decoded_by = decode_implementation(model, batch, implementation if options.max_new_tokens else None)
    return Request(
        weights=weights,
        rows=rows,
        max_new_tokens=int(options.max_new_tokens),
        stop_ids=frozenset(stop_ids),
        stop=stop,
        tokenizer=tokenizer,
        policy=chosen,
        implementation=implementation,
        decoded_by=decoded_by,
        on_device=DecodeOptions(
            stop=_host(stop_mask),
            valid_vocab=_host(np.int32(valid)),
            sampler=sampler if sampling else None,
            keys=_host(keys) if sampling else None,
        ),
    )


def _host(value: np.ndarray | np.generic) -> jax.Array:
    """A numpy array where programs want an array: they take either, and place it where their weights are."""
    return cast(jax.Array, np.asarray(value))


def _eos_ids(params: Params, tokenizer: Tokenizer | None) -> tuple[str, tuple[int, ...]]:
    """EOS ids with their name: the checkpoint's; the tokenizer's where it names none (the original layout cannot)."""
    eos = getattr(tokenizer, "eos_token_id", None)
    if params.text.eos_token_ids or eos is None:
        return "params.text.eos_token_ids", params.text.eos_token_ids
    return "tokenizer.eos_token_id", (eos,)


def _generate(request: Request, mode: Mode, *, logprobs: bool, return_cache: bool) -> list[Generation]:
    start = time.perf_counter()
    compile_for(request, return_cache=return_cache)
    compiled = time.perf_counter()
    first, decisions = jax.block_until_ready(_state_after(request, request.rows))
    prefilled = time.perf_counter()
    rows, state = [_Row(request, prompt) for prompt in request.rows], first
    blocks = _run(request, first, rows, mode)
    with track("Generating", request.max_new_tokens, show=None if request.max_new_tokens > BLOCK else False) as advance:
        for tokens, scores, state in blocks:  # noqa: B007
            for row, row_tokens, row_scores in zip(rows, tokens, scores, strict=True):
                row.push(row_tokens, row_scores)
            advance(tokens.shape[1])
    for row in rows:
        row.finish()
    if return_cache and any(row.matched for row in rows):  # the device went on beyond the stop string
        texts = [prompt + row.tokens for prompt, row in zip(request.rows, rows, strict=True)]
        state, _ = _state_after(request, texts, request.max_new_tokens)
    if return_cache and not np.isfinite(state.logits).all():
        raise FloatingPointError(f"logits: not finite after the last token; {_NOT_FINITE}")
    decode_s = time.perf_counter() - prefilled
    timings = {
        "compile_s": compiled - start,
        "prefill_s": prefilled - compiled,
        "decode_s": decode_s,
        "tokens_per_s": sum(len(row.tokens) for row in rows) / decode_s,
    }
    left = [_take_row(request, state, i) for i in range(len(rows))] if return_cache else [(None, None)] * len(rows)
    return [
        Generation(
            tokens=row.tokens,
            text=row.text,
            logprobs=row.logprobs if logprobs else None,
            finish_reason="stop" if row.stopped else "length",
            timings=timings,
            decisions=decisions,
            decoded_by=request.decoded_by,
            cache=cache,
            next_logits=next_logits,
        )
        for row, (cache, next_logits) in zip(rows, left, strict=True)
    ]


def _take_row(request: Request, state: DecodeState, row: int) -> tuple[MambaCache, jax.Array]:
    run = program(request.weights, Spec("row", request.batch))
    return run(state.cache, state.logits, np.array(row, np.int32))


def _stream(request: Request) -> Iterator[str]:
    compile_for(request)
    row = _Row(request, request.rows[0])
    state, _ = _state_after(request, request.rows)
    for tokens, logprobs, _ in _run(request, state, [row], "device", block=TEXT_BLOCK):
        if piece := row.push(tokens[0], logprobs[0]):
            yield piece
    if piece := row.finish():
        yield piece


def compile_for(request: Request, *, return_cache: bool = False) -> None:
    """Compile what the request needs and the process does not have yet."""
    longest = max(len(row) for row in request.rows)
    plan = make_plan(model_of(request.weights), len(request.rows), longest, request.policy, request.implementation)
    specs = reading_specs("prefill", plan.batch, plan.programs)
    if request.max_new_tokens:
        specs.append(_decode_spec(request))
    if return_cache:
        specs.append(Spec("row", request.batch))
    compile_programs(request.weights, specs)


def _decode_spec(request: Request) -> Spec:
    sampling = request.on_device.sampler is not None
    return Spec("decode", request.batch, BLOCK, sampling=sampling, implementation=request.decoded_by)


def _state_after(
    request: Request, texts: list[list[int]], position: int = 0
) -> tuple[DecodeState, tuple[Decision, ...]]:
    """The decode state after texts of which the last `position` ids were generated, and how they were read."""
    cache, logits, decisions = read_prompts(request.weights, texts, request.policy, request.implementation)
    seen = None
    if request.on_device.sampler is not None:
        mask = np.zeros(logits.shape, bool)
        for i, text in enumerate(texts):
            mask[i, text] = True
        seen = _host(mask)
    finished = np.arange(request.batch) >= len(texts)  # dummy rows never begin
    state = DecodeState(
        cache=cache, logits=logits, finished=_host(finished), position=_host(np.int32(position)), seen=seen
    )
    return state, decisions


class _Row:
    """One row's continuation as it grows.

    Attributes:
        tokens: ids so far, up to the one that ended the row.
        logprobs: of each.
        stopped: a stop token or a stop string ended the row.
    """

    def __init__(self, request: Request, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False
        self._stop_ids = request.stop_ids
        tokenizer = request.tokenizer
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer, request.stop, before=prompt)
        self._text = ""

    def push(self, tokens: np.ndarray, logprobs: np.ndarray) -> str:
        """Take the row's part of a block (-1: no token) and return the text that became certain."""
        if self.stopped:
            return ""
        count = int((tokens >= 0).sum())
        new = tokens[:count].tolist()
        if not np.isfinite(logprobs[:count]).all():
            raise FloatingPointError(
                f"logits: not finite after {len(self.tokens)} to {len(self.tokens) + count} new tokens; {_NOT_FINITE}"
            )
        self.tokens += new
        self.logprobs += logprobs[:count].tolist()
        self.stopped = bool(new) and new[-1] in self._stop_ids
        if self._decoder is None:
            return ""
        return self._take(self._decoder, self._decoder.push(new[:-1] if self.stopped else new))

    def finish(self) -> str:
        """Return what text was still held back, after which `text` is whole."""
        if self._decoder is None:
            return ""
        return self._take(self._decoder, self._decoder.finish())

    def _take(self, decoder: TextDecoder, piece: str) -> str:
        if decoder.matched is not None:
            self.stopped = True
            del self.tokens[decoder.kept :], self.logprobs[decoder.kept :]
        self._text += piece
        return piece

    @property
    def matched(self) -> bool:
        """Whether a stop string ended the row."""
        return self._decoder is not None and self._decoder.matched is not None

    @property
    def text(self) -> str | None:
        """The text given out so far; None without a tokenizer."""
        return None if self._decoder is None else self._text


def _run(
    request: Request,
    state: DecodeState,
    rows: list[_Row],
    mode: Mode,
    *,
    block: int | None = None,
) -> Iterator[Block]:
    """Blocks of the request in the given mode; `rows`, fed by the caller, tell which rows the host has stopped."""
    if mode == "recompute":
        return _recompute(request, state, rows)
    if mode == "host":
        return _blocks(request, state, rows, block=1, depth=1)
    return _blocks(request, state, rows, block=block or (TEXT_BLOCK if request.stop else BLOCK), depth=2)


def _blocks(request: Request, state: DecodeState, rows: list[_Row], *, block: int, depth: int) -> Iterator[Block]:
    """Run the decode program block after block, `depth` of them launched before the first is read."""
    weights, left = request.weights, request.max_new_tokens
    flying: collections.deque[tuple[int, jax.Array, jax.Array]] = collections.deque()
    stopped = np.zeros(request.batch, bool)
    while left or flying:
        while left and len(flying) < depth:
            if sum(row.stopped for row in rows) > stopped.sum():
                stopped[: len(rows)] = [row.stopped for row in rows]
                state = dataclasses.replace(state, finished=_host(np.asarray(state.finished) | stopped))
            count = min(left, block)
            run = program(weights, _decode_spec(request))
            state, tokens, logprobs = run(weights, state, request.on_device, np.array(count, np.int32))
            flying.append((count, tokens, logprobs))
            left -= count
        count, tokens, logprobs = flying.popleft()
        yield np.asarray(tokens)[: len(rows), :count], np.asarray(logprobs)[: len(rows), :count], state
        if all(row.stopped for row in rows):
            return  # what still flies ends at once: its rows have finished


def _recompute(request: Request, state: DecodeState, rows: list[_Row]) -> Iterator[Block]:
    """One token at a time with no cache: the whole text is read again before each."""
    one = dataclasses.replace(request, max_new_tokens=1)
    for position in range(request.max_new_tokens):
        if position:
            texts = [prompt + row.tokens for prompt, row in zip(request.rows, rows, strict=True)]
            state, _ = _state_after(request, texts, position)
        yield from _blocks(one, state, rows, block=1, depth=1)
        if all(row.stopped for row in rows):
            return
