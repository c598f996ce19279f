"""The models of this package in EleutherAI's lm-eval, version 0.4.

lm-eval knows the model types that are registered when it starts, and has no entry point for those of other packages.
So this module registers "mamba_jax" when it is imported, and is lm-eval's command line when it is run:

    python -m mamba_jax.lm_eval --model mamba_jax --model_args pretrained=FOLDER,dtype=float32 --tasks TASK

From Python, `import mamba_jax.lm_eval` and then `lm_eval.simple_evaluate(model="mamba_jax", model_args=...)`, or pass
it a `MambaJax`.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from mamba_jax import text as text_lib
from mamba_jax.checkpoints import load
from mamba_jax.generate import generate
from mamba_jax.params import Params
from mamba_jax.planning import as_policy
from mamba_jax.programs import program_weights
from mamba_jax.progress import track
from mamba_jax.scheduler.compilation_cache import enable_compilation_cache
from mamba_jax.scoring import BATCH, token_logprobs

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import Collator, has_bos_prefix, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("mamba_jax.lm_eval needs the package lm-eval: pip install 'mamba-jax[eval]'") from error

_logger = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what `generate` also calls so

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # (what to cache it by, context, continuation)


@register_model("mamba_jax")
class MambaJax(TemplateLM):
    """A model of this package behind lm-eval's interface.

    A recurrent model has no longest text. `max_length` is there so that figures can be compared with those of other
    models and of lm-eval's own wrappers, which cut contexts from the left: 2048, as theirs for Mamba. A larger one
    costs time but no memory.
    """

    def __init__(
        self,
        pretrained: str | Params,
        *,
        dtype: str | None = None,
        tokenizer: str | text_lib.Tokenizer | None = None,
        revision: str | None = None,
        batch_size: int | str = BATCH,
        max_batch_size: int | None = None,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        policy: str | None = None,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        """Load a model.

        Args:
            pretrained: a folder or hub id of a checkpoint, or a loaded model.
            dtype: of the weights: "bfloat16", "float16", "float32"; None or "auto" for the file's.
            tokenizer: one to use instead of the checkpoint's, or the folder of one.
            revision: of a hub id.
            batch_size: texts run together; "auto" takes 8.
            max_batch_size: most of them.
            max_length: most tokens of a text; of a longer one the end is kept.
            max_gen_toks: most tokens to generate where a task does not say.
            add_bos_token: whether texts begin with the BOS token; None leaves it to the tokenizer.
            policy: what decides chunk sizes; speed only. As in `generate`.
            seed: of the sampling, where a task asks for it.
            device: what lm-eval thinks of; a warning says if JAX runs elsewhere, which JAX_PLATFORMS decides.

        Raises:
            ValueError: if an argument does not fit; the message names it.
        """
        super().__init__()
        _note_device(device)
        if isinstance(pretrained, Params):
            self.params, self._name = pretrained, ""
        else:
            wanted: Any = None if dtype == "auto" else dtype
            self.params, self._name = load(pretrained, dtype=wanted, revision=revision), pretrained
        source = tokenizer if tokenizer is not None else self.params.text.tokenizer
        if source is None:
            raise ValueError("tokenizer: there is none beside the weights; name one with tokenizer=PATH")
        self.tokenizer: Any = text_lib.load_tokenizer(source) if isinstance(source, str) else source
        self.batch_size = _at_least("batch_size", BATCH if str(batch_size).startswith("auto") else batch_size, 1)
        if max_batch_size is not None:
            self.batch_size = min(self.batch_size, _at_least("max_batch_size", max_batch_size, 1))
        self.max_length = _at_least("max_length", max_length, 2)
        self.max_gen_toks = _at_least("max_gen_toks", max_gen_toks, 1)
        self.seed = _at_least("seed", seed, 0)
        self.add_bos_token = add_bos_token
        self.policy = as_policy(policy, self.params.config.n_layer)
        self._weights = program_weights(self.params)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        self._eos_ids = self.params.text.eos_token_ids or (() if eos is None else (eos,))
        if not self._eos_ids:
            raise ValueError("tokenizer: neither it nor the checkpoint names an EOS token, which ends and begins texts")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the BOS token, or EOS where there is none."""
        for bos in (self.params.text.bos_token_id, getattr(self.tokenizer, "bos_token_id", None)):
            if bos is not None:
                return bos
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's cache of requests."""
        return str(getattr(self.tokenizer, "name_or_path", "") or self._name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return {"model_num_parameters": size, "model_dtype": self.params.dtype.name}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, by the tokenizer's template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens as told, else as the model's argument or the tokenizer says, but no second BOS."""
        del kwargs
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if has_bos_prefix(string, getattr(self.tokenizer, "bos_token", None)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, split where the context alone ends; neither is empty.

        Where the tokenizer joins the border so that nothing is left of the continuation, it is tokenized by itself.
        """
        before, after = super()._encode_pair(context, continuation)
        if not after:
            after = self.tok_encode(continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], after

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would give it; in the order asked."""
        del kwargs
        longest = max((len(after) for _, _, after in requests), default=0)
        if longest > self.max_length:
            raise ValueError(f"max_length: got {self.max_length}, wanted at least {longest}, a continuation's tokens")
        rows = [(before + after)[-self.max_length - 1 :] for _, before, after in requests]
        self._warn_of_cuts(sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests), len(rows))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        with track("Scoring", len(rows), show=False if disable_tqdm else None) as advance:
            for start in range(0, len(order), self.batch_size):
                indices = order[start : start + self.batch_size]
                group = [rows[i] for i in indices]
                found = token_logprobs(self._weights, group, batch=self.batch_size, policy=self.policy, bar=False)
                for i, (logprobs, likeliest) in zip(indices, found, strict=True):
                    key, _, after = requests[i]
                    first = len(logprobs) - len(after)
                    results[i] = float(logprobs[first:].sum(dtype="float64")), bool(likeliest[first:].all())
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, results[i])
                advance(len(indices))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in windows of `max_length` that predict each token once."""
        windows: list[Pair] = []
        counts = []
        for (string,) in (request.args for request in requests):
            spans = get_rolling_token_windows(self.tok_encode(string), self.prefix_token_id, self.max_length, 1)
            pairs: list[Pair] = [(None, *make_disjoint_window(span)) for span in spans]
            windows += pairs
            counts.append(len(pairs))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string or token, or its most tokens; in the order asked."""
        arguments = [request.args for request in requests]
        rows = [self.tok_encode(context) or [self.prefix_token_id] for context, _ in arguments]
        numbered = [(i, row, kwargs) for i, (row, (_, kwargs)) in enumerate(zip(rows, arguments, strict=True))]
        by_kwargs = Collator(
            numbered,
            sort_fn=lambda item: (-len(item[1]), item[0]),
            group_fn=lambda item: item[2],
            group_by="gen_kwargs",
        )
        results = [""] * len(arguments)
        with track("Generating", len(arguments), show=False if disable_tqdm else None) as advance:
            for batch in by_kwargs.get_batched(n=self.batch_size):
                indices, group, (kwargs, *_) = zip(*batch, strict=True)
                for i, text in zip(indices, self._continue(group, kwargs, indices), strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", arguments[i], text)
                advance(len(indices))
        return results

    def _continue(self, rows: Sequence[list[int]], asked: Mapping[str, Any], indices: Sequence[int]) -> list[str]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        new, sampled = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        until, stop_ids = self._stops(kwargs.pop("until", None) or [])
        options = {name: kwargs.pop(name) for name in _SAMPLING if kwargs.get(name) is not None}
        if kwargs:
            known = ("until", "max_gen_toks", "do_sample", *_SAMPLING)
            raise ValueError(f"gen_kwargs: got {sorted(kwargs)}, wanted some of {', '.join(known)}")
        if not sampled:
            options["temperature"] = 0.0
        room = self.max_length - new
        if room < 1:
            raise ValueError(f"max_gen_toks: got {new}, wanted less than max_length, which is {self.max_length}")
        self._warn_of_cuts(sum(len(row) > room for row in rows), len(rows))
        done: Any = generate(  # a list of prompts gives a list
            self.params,
            [row[-room:] for row in rows],
            max_new_tokens=new,
            stop=until,
            stop_token_ids=stop_ids,
            seed=[self.seed + i for i in indices],
            tokenizer=self.tokenizer,
            policy=self.policy,
            **options,
        )
        return [generation.text for generation in done]

    def _stops(self, until: str | Iterable[str]) -> tuple[list[str], list[int]]:
        """Stop strings and stop tokens; a stop string that is a special token never shows in a text."""
        strings = [until] if isinstance(until, str) else list(until)
        special = {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        ids = [special[item] for item in strings if item in special]
        return [item for item in strings if item and item not in special], [*self._eos_ids, *ids]

    def _warn_of_cuts(self, cut: int, of: int) -> None:
        if cut:
            _logger.warning(
                "%d of %d texts are longer than max_length=%d allows: only their ends are read",
                cut,
                of,
                self.max_length,
            )


def _at_least(name: str, value: Any, least: int) -> int:
    number = int(value) if str(value).isdigit() else None
    if number is None or number < least:
        raise ValueError(f"{name}: got {value!r}, wanted a number of at least {least}")
    return number


def _note_device(device: str | None) -> None:
    """JAX has chosen where it runs. lm-eval says cuda:0 where nobody asked for a device."""
    platform = {"cuda": "gpu"}.get(name := (device or "").partition(":")[0], name)
    if device not in (None, "cuda:0") and platform != jax.default_backend():
        _logger.warning("device: got %r, but JAX runs on %r; JAX_PLATFORMS decides", device, jax.default_backend())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    with contextlib.suppress(OSError):  # where no cache can be kept, it runs all the same
        enable_compilation_cache()
    cli_evaluate()
