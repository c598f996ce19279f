"""`mamba-jax`: the command line. Results go to stdout, everything else to stderr.

Exit codes: 0 done; 2 a wrong use of the command line, which is what the arguments alone can tell, found before a model
is looked for; 1 any other error; 130 interrupted.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:  # these bring jax and transformers along, which --help does not need
    from mamba_jax.longbench import Summary
    from mamba_jax.params import Params
    from mamba_jax.parity import Parity
    from mamba_jax.planning import Model
    from mamba_jax.scoring import Score

_NUMBER = re.compile("[0-9]{1,18}")

app = typer.Typer(
    help="Run Mamba language models: continue text, score it, look at checkpoints and convert them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _check_name(value: str | None) -> str | None:
    if value == "":
        raise typer.BadParameter("got '', wanted a folder or a hub id")
    return value


def _check_text(value: str | None) -> str | None:
    """Refuse an argument that was no UTF-8: Python holds its bytes as halves of surrogate pairs."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter("got bytes that are no UTF-8 text") from error
    return value


def _check_stop(value: list[str] | None) -> list[str] | None:
    for item in value or ():
        if not _check_text(item):
            raise typer.BadParameter("got '', wanted strings of at least one character")
    return value


def _check_policy(value: Any) -> Any:
    """Of one policy, or of several."""
    for name in value if isinstance(value, list) else [value] if value is not None else []:
        from mamba_jax.messages import clip
        from mamba_jax.planning import as_policy

        try:
            as_policy(name)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(clip(error, 1000)) from error
    return value


def _check_both(option: str, value: str | None, implementation: str | None) -> None:
    """Of an option that chooses chunk sizes, and --implementation."""
    if value not in (None, "measured") and implementation == "pallas":
        raise typer.BadParameter(
            f"got {value!r:.80} beside --implementation pallas, whose kernels have no chunk size to choose",
            param_hint=option,
        )


def _check_deciding(value: str) -> str:
    """Of a policy that decides by a statistic."""
    from mamba_jax.planning import as_policy, watch_for

    _check_policy(value)
    if watch_for(as_policy(value)) is None:
        raise typer.BadParameter(f"got {value!r:.80}, wanted one that looks at a statistic, as 'entropy:sampled' does")
    return value


def _check_other(value: str) -> str:
    """Of what parity is told to compare with."""
    if value not in ("transformers", "mamba_ssm") and not Path(value).is_file():
        raise typer.BadParameter(f"got {value!r:.80}, wanted transformers, mamba_ssm, or a file that is there")
    return value


def _folder(value: str | Path) -> Path:
    """The path of a folder to write to; a Path made of "" would be the current one."""
    if value == "":
        raise typer.BadParameter("got '', wanted a folder")
    return Path(value)


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        callback=_check_name,
        help="Folder or hub id of a checkpoint.",
        show_default="the embedded model",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        callback=_check_name, help="Folder or hub id of a tokenizer.", show_default="the one beside the weights"
    ),
]
DTypeOption = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="Type of the weights.", show_default="the file's"),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        callback=_check_policy,
        help="What decides chunk sizes: measured, static:128, length, entropy, corey-default, layers:64,128,... ...",
        show_default="measured",
    ),
]
ImplementationOption = Annotated[
    Literal["xla", "pallas"] | None,
    typer.Option(
        help="Of scans and steps: XLA's operations, or the kernels for NVIDIA GPUs or TPUs.",
        show_default="the faster, where measured",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        args: what follows the program's name; None takes it from `sys.argv`.
    """
    if sys.stderr is None:  # closed by the caller, who does not care
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:  # before a file that is opened takes its place
        sys.stderr.write("error: stdout is closed\n")
        sys.exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks becomes a "?"
    try:
        app(args=None if args is None else list(args), prog_name="mamba-jax")
    except (ValueError, OSError, FloatingPointError, ImportError, NotImplementedError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        import jax

        import mamba_jax

        _write(f"mamba-jax {mamba_jax.__version__} (jax {jax.__version__})\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue. Read from stdin if it is '-', or absent and stdin is no terminal; one newline at "
            "the end of stdin is left out.",
            callback=_check_text,
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, max=2**26, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample among the likeliest tokens that reach this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample among tokens this fraction as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(min=0, help="Above 1 makes tokens that were there before less likely.")
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the sampling; the same seed gives the same text.", show_default="0"),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            callback=_check_stop, help="End before this string; may be given several times.", show_default=False
        ),
    ] = None,
    dtype: DTypeOption = None,
    as_json: JsonOption = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is whole.")] = False,
    tokenizer: TokenizerOption = None,
    policy: PolicyOption = None,
    implementation: ImplementationOption = None,
) -> None:
    """Continue a text and print the continuation.

    A base model goes on for ever, often repeating itself: see --max-new-tokens, --stop and --repetition-penalty.
    """
    _check_both("--policy", policy, implementation)
    text = _read_prompt(prompt)
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    _check_sampling(sampling, seed)
    import mamba_jax

    _enable_cache()
    params = _load(model, dtype)
    options: dict[str, Any] = {
        **sampling,
        "max_new_tokens": max_new_tokens,
        "seed": seed or 0,
        "stop": stop or None,
        "tokenizer": tokenizer,
        "policy": policy,
        "implementation": implementation,
    }
    if not as_json and not no_stream:
        for piece in mamba_jax.stream(params, text, **options):
            _write(piece)
        _write("\n")
        return
    result: Any = mamba_jax.generate(params, text, logprobs=as_json, **options)  # of one prompt: one Generation
    if as_json:
        names = ("tokens", "text", "logprobs", "finish_reason", "timings", "decoded_by")
        read_by = [decision.implementation for decision in result.decisions]
        _write_json({name: getattr(result, name) for name in names} | {"read_by": read_by})
    else:
        _write(f"{result.text}\n")


def _check_sampling(sampling: dict[str, Any], seed: int | None) -> None:
    """What the library would refuse is a wrong use of the command line; what changes nothing is said on stderr."""
    from mamba_jax.sampling import Sampler, row_keys

    try:
        Sampler.of(1, **sampling)
        row_keys(seed or 0, 1)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise typer.BadParameter(problem, param_hint=f"--{name.replace('_', '-')}") from error
    given = [name for name in ("top_k", "top_p", "min_p") if sampling[name] is not None]
    given += [] if seed is None else ["seed"]
    if given and sampling["temperature"] == 0:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        sys.stderr.write(f"at --temperature 0 the likeliest token is taken: {options} changes nothing\n")


@app.command()
def score(
    text: Annotated[
        str | None,
        typer.Argument(
            help="Text to score. Read from stdin, as it is, if it is '-', or absent and stdin is no terminal.",
            callback=_check_text,
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Score this file's text.", show_default=False)
    ] = None,
    model: ModelOption = None,
    dtype: DTypeOption = None,
    as_json: JsonOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Print the log-probability of each token of a text, and the perplexity of the whole.

    Each line has the natural logarithm of the token's probability (- for the first, which nothing predicts), its id
    and its text.
    """
    if file is not None and text is not None:
        raise typer.BadParameter("got both TEXT and --file, wanted one", param_hint="--file")
    text = _decode(file.read_bytes(), str(file)) if file is not None else _read_text(text, "TEXT")
    if not text:
        raise ValueError("got an empty text, wanted one to score")
    import mamba_jax
    from mamba_jax.text import load_tokenizer

    _enable_cache()
    params = _load(model, dtype)
    source = tokenizer or params.text.tokenizer
    if source is None:
        raise ValueError("tokenizer: there is none beside the weights; name one with --tokenizer PATH")
    loaded = load_tokenizer(source)
    result = mamba_jax.score(params, text, tokenizer=loaded)
    _print_score(result, loaded, as_json)


def _print_score(result: "Score", tokenizer: Any, as_json: bool) -> None:
    from mamba_jax.perplexity import perplexity_of
    from mamba_jax.text import token_pieces

    pieces, scored = token_pieces(tokenizer, result.tokens), len(result.tokens) - 1
    perplexity = perplexity_of(result.total, scored) if scored else None
    if as_json:
        values = dataclasses.asdict(result)
        _write_json({**values, "pieces": pieces, "total": result.total, "perplexity": perplexity})
        return
    for token, piece, logprob in zip(result.tokens, pieces, result.logprobs, strict=True):
        shown = "-" if logprob is None else f"{logprob:.4f}"
        _write(f"{shown:>10}  {token:>7}  {json.dumps(piece, ensure_ascii=False)}\n")
    shown = "-" if perplexity is None else f"{perplexity:.4f}"
    _write(f"{scored} tokens scored, log-probability {result.total:.4f}, perplexity {shown}\n")


@app.command()
def perplexity(
    file: Annotated[Path, typer.Option("--text", exists=True, dir_okay=False, help="A UTF-8 text.")],
    model: ModelOption = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 1024,
    stride: Annotated[int, typer.Option(min=1, help="Tokens from one window to the next.")] = 512,
    whole: Annotated[bool, typer.Option("--whole", help="No windows: carry the state through the text.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Windows read together.")] = 8,
    chunk_size: Annotated[str, typer.Option(help="Of XLA's scans: auto, or a number.")] = "auto",
    implementation: ImplementationOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=_folder,
            metavar="FOLDER",
            help="Folder that keeps what is done; a run that was killed goes on there.",
            show_default=False,
        ),
    ] = None,
    dtype: DTypeOption = None,
    as_json: JsonOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Print the perplexity of a text: token-weighted, each token but the first scored once."""
    if chunk_size != "auto":
        _numbers("--chunk-size", chunk_size, ",", count=1)
        _check_both("--chunk-size", chunk_size, implementation)
    if stride >= window and not whole:
        raise typer.BadParameter(f"got {stride}, wanted less than --window, {window}", param_hint="--stride")
    text = _decode(file.read_bytes(), str(file))
    import mamba_jax

    _enable_cache()
    result = mamba_jax.perplexity(
        _load(model, dtype),
        text,
        window=None if whole else window,
        stride=stride,
        batch=batch,
        policy=None if chunk_size == "auto" else f"static:{chunk_size}",
        implementation=implementation,
        tokenizer=tokenizer,
        out=out,
    )
    if as_json:
        _write_json(dataclasses.asdict(result))
        return
    how = "state carried through" if whole else f"windows of {window}, stride {stride}"
    _write(f"perplexity {result.perplexity:.4f} of {result.tokens_scored:,} tokens ({how}, {result.dtype})\n")


@app.command()
def longbench(
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with TASK.jsonl files, dataset2prompt.json and dataset2maxlen.json.",
        ),
    ] = None,
    model: ModelOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="May be given several times.", show_default="all that have samples and a template"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            parser=_folder,
            metavar="FOLDER",
            help="Folder for predictions and summary; a run that was killed goes on there.",
        ),
    ] = Path("longbench-results"),
    max_samples: Annotated[int | None, typer.Option(min=1, help="Most samples a task.", show_default="all")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Samples of each task to leave out first.")] = 0,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of a prompt; longer ones lose their middle.", show_default="no limit"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="the task's")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples run together.")] = 1,
    policy: PolicyOption = None,
    implementation: ImplementationOption = None,
    dtype: DTypeOption = None,
    tokenizer: TokenizerOption = None,
    shard: Annotated[
        str | None,
        typer.Option(help="i/n: run the i-th of n parts, into a folder of its own in --out.", show_default=False),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Run nothing: put the parts in this folder together, into --out. May be given several times.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the long questions of LongBench, greedily, and score the answers.

    --out gets TASK.jsonl with a line for each sample, and summary.json.
    """
    _check_both("--policy", policy, implementation)
    if (data is None) == (not merge):
        raise typer.BadParameter("wanted either --data, or --merge of what ran before", param_hint="--data")
    from mamba_jax import longbench as lib

    if merge:
        summary = lib.merge(merge, out)
    else:
        part = None
        if shard is not None:
            first, number = _numbers("--shard", shard, "/", count=2, ascending=True)
            part, out = (first, number), out / f"shard-{first}-of-{number}"
        _enable_cache()
        summary = lib.run(
            _load(model, dtype),
            data or "",
            out,
            tasks=task,
            name=_model(model),
            offset=offset,
            max_samples=max_samples,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            batch=batch,
            policy=policy,
            implementation=implementation,
            tokenizer=tokenizer,
            shard=part,
        )
    if as_json:
        _write_json(dataclasses.asdict(summary))
    else:
        _print_longbench(summary, out)


def _print_longbench(summary: "Summary", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, title=f"{summary.model}, {summary.dtype}", title_justify="left")
    columns = ("", "samples", "score", "exact", "F1", "ROUGE-L", "prompt", "cut", "new", "latency s", "tokens/s")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, part in [*summary.tasks.items(), ("all", summary.all)]:
        score = "-" if part.score is None else f"{part.score:.2f}"
        metrics = (f"{value:.2f}" for value in (part.exact_match, part.f1, part.rouge_l))
        speed = (f"{part.latency_s:.2f}", f"{part.tokens_per_s:.1f}")
        tokens = (f"{part.prompt_tokens:.0f}", str(part.cut), f"{part.new_tokens:.0f}")
        table.add_row(name, str(part.samples), score, *metrics, *tokens, *speed)
    console = Console(markup=False, highlight=False, width=120)
    console.print(table)
    console.print(f"prompt and new in tokens, cut in samples; policy {summary.policy}; written to {out}")


@app.command()
def parity(
    against: Annotated[
        str,
        typer.Option(
            callback=_check_other,
            help="transformers, mamba_ssm (on a GPU), or a safetensors file of recorded outputs.",
        ),
    ],
    model: ModelOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--text", exists=True, dir_okay=False, help="Also compare the perplexity of this text."),
    ] = None,
    dtype: DTypeOption = "float32",
    implementation: ImplementationOption = None,
    as_json: JsonOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Compare hidden states, logits, greedy tokens and perplexity with another implementation.

    Exits with 1 if float32 results are outside the tolerances.
    """
    from mamba_jax import parity as lib

    text = None if file is None else _decode(file.read_bytes(), str(file))
    params = _load(model, dtype)
    found = lib.against(params, against, text=text, tokenizer=tokenizer, implementation=implementation)
    if as_json:
        _write_json(dataclasses.asdict(found))
    else:
        print_parity(found)
    if found.verdict is False:
        raise typer.Exit(1)


def print_parity(found: "Parity") -> None:
    """Print a comparison as a table, with its verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, title=f"{found.dtype} against {found.against}, {found.tokens} tokens", title_justify="left")
    for column in ("", "largest difference", "relative", "tolerated", "theirs from the truth"):
        table.add_column(column, justify="left" if not column else "right")
    errors = found.their_error or (None, None)
    for name, part, error in (("hidden states", found.hidden, errors[0]), ("logits", found.logits, errors[1])):
        if part is not None:
            tolerated = f"{part.atol:g}" + (f" + {part.rtol:g} x" if part.rtol else "")
            shown = "-" if error is None else f"{error:.2g}"
            table.add_row(name, f"{part.max_abs:.2g}", f"{part.max_rel:.2g}", tolerated, shown)
    console = Console(markup=False, highlight=False)
    console.print(table)
    lines = [f"precision of our products: {found.precision}"]
    if found.argmax_equal is not None:
        lines.append(f"likeliest token equal at {found.argmax_equal:.2%} of positions")
    if found.greedy_equal is not None:
        same, of = found.greedy_equal
        where = "" if same == of else f"; the first differs at new token {found.greedy_first_difference}"
        lines.append(f"{same} of {of} greedy continuations equal{where}")
    if found.perplexity is not None and found.their_perplexity is not None:
        lines.append(f"perplexity {found.perplexity:.5f}, theirs {found.their_perplexity:.5f}")
    verdicts = {True: "within the tolerances", False: "NOT within the tolerances", None: "no verdict but for float32"}
    console.print("\n".join([*lines, verdicts[found.verdict]]))


@app.command()
def info(model: ModelOption = None, as_json: JsonOption = False) -> None:
    """Print what a checkpoint holds, without reading its weights."""
    from mamba_jax.checkpoints.archive import open_weights
    from mamba_jax.checkpoints.configs import read_config
    from mamba_jax.checkpoints.hub import find_folder
    from mamba_jax.checkpoints.loading import match_weights
    from mamba_jax.progress import at_terminal

    folder = find_folder(_model(model), None, at_terminal())
    config, text = read_config(folder)
    config, stored = match_weights(config, open_weights(folder), str(folder))
    import jax

    from mamba_jax.cache import init_cache
    from mamba_jax.params import param_shapes

    dtype = stored["embedding"].dtype
    leaves = jax.tree.leaves(param_shapes(config))
    cache = jax.tree.leaves(jax.eval_shape(lambda: init_cache(config, 1, dtype)))
    facts = {
        "model": str(folder),
        "architecture": dataclasses.asdict(config) | {"padded_vocab_size": config.padded_vocab_size},
        "parameters": sum(leaf.size for leaf in leaves),
        "dtype": dtype.name,
        "bytes": sum(tensor.size * tensor.dtype.itemsize for tensor in stored.values()),
        "cache_bytes_per_row": sum(leaf.size * leaf.dtype.itemsize for leaf in cache),
        "tokenizer": text.tokenizer,
        "eos_token_ids": list(text.eos_token_ids),
        "bos_token_id": text.bos_token_id,
    }
    if as_json:
        _write_json(facts)
    else:
        _print_facts(facts)


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in (facts | facts["architecture"]).items():
        if name == "architecture":
            continue
        number = isinstance(value, int) and not isinstance(value, bool)
        table.add_row(name, f"{value:,}" if number else "none" if value is None else str(value))
    Console(markup=False, highlight=False).print(table)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", callback=_check_name, help="Folder or hub id of a checkpoint.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", parser=_folder, help="Folder to write, without a checkpoint in it.")
    ],
    layout: Annotated[
        Literal["hf", "original"],
        typer.Option(help="hf: Hugging Face's, for transformers; original: state-spaces', for mamba_ssm."),
    ],
    dtype: DTypeOption = None,
) -> None:
    """Write a checkpoint in another layout or type: safetensors, config and tokenizer."""
    import mamba_jax

    params = _load(source, dtype)
    mamba_jax.save(params, target, layout=layout)
    sys.stderr.write(f"wrote {target}\n")


@app.command()
def plan(
    length: Annotated[int, typer.Option(min=1, max=2**26, help="Tokens of the prompt (of the longest, in a batch).")],
    model: ModelOption = None,
    batch: Annotated[int, typer.Option(min=1, max=2**16, help="Prompts read together.")] = 1,
    policy: PolicyOption = None,
    implementation: ImplementationOption = None,
    dtype: DTypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what reading a prompt would run: segments, programs, chunk sizes, why, and the expected time."""
    from mamba_jax.planning import as_policy, decode_implementation, make_plan

    _check_both("--policy", policy, implementation)
    described = _described(model, dtype)
    made = make_plan(described, batch, length, as_policy(policy, described.config.n_layer), implementation)
    facts = {
        "length": made.length,
        "batch": made.batch,
        "seconds": made.seconds,
        "source": made.source,
        "decoded_by": decode_implementation(described, batch, implementation),
        "candidates": {str(size): list(chunks) for size, chunks in made.candidates.items()},
        "segments": [
            {
                "length": segment.length,
                "implementation": segment.implementation,
                "chunk_size": segment.chunk_size,
                "seconds": segment.seconds,
                "decisions": [dataclasses.asdict(decision) for decision in segment.decisions],
            }
            for segment in made.segments
        ],
    }
    if as_json:
        _write_json(facts)
    else:
        _print_plan(facts)


def _print_plan(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("segment", "positions", "run by", "chunk size", "decided by", "expected ms"):
        table.add_column(column, justify="left" if column == "decided by" else "right")
    first = 0
    for segment, alike in itertools.groupby(facts["segments"]):
        last = first + len(list(alike)) - 1
        seconds = "-" if segment["seconds"] is None else f"{segment['seconds'] * 1e3:.2f}"
        names = ", ".join(sorted({decision["policy"] for decision in segment["decisions"]}))
        chunk_size = segment["chunk_size"]
        shown = str(chunk_size) if isinstance(chunk_size, int) else " ".join(map(str, chunk_size))
        if segment["implementation"] == "pallas":
            shown = "its own"
        which = f"{first}" if first == last else f"{first} to {last}"
        table.add_row(which, f"{segment['length']:,}", segment["implementation"], shown, names, seconds)
        first = last + 1
    console = Console(markup=False, highlight=False)
    console.print(table)
    for size, chunks in facts["candidates"].items():
        console.print(f"from segment 2 on, a statistic chooses among {chunks} on {size} positions")
    total = "not measured" if facts["seconds"] is None else f"{facts['seconds'] * 1e3:.2f} ms"
    console.print(f"{facts['length']:,} positions, {facts['batch']} rows: {total}; steps by {facts['decoded_by']}")
    console.print(facts["source"])


@app.command()
def warm(
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(help="Numbers of prompts, as in 1,8; each of 1 to 65536.")] = "1",
    lengths: Annotated[
        str, typer.Option(help="Fewest and most tokens of a prompt, generated ones not counted, as in 1:8192.")
    ] = "1:2048",
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**26,
            help="Most tokens a request generates; what reads a prompt and as many is compiled too, since a generation "
            "that a stop string ended may be read again.",
        ),
    ] = 128,
    policy: Annotated[
        list[str] | None,
        typer.Option(callback=_check_policy, help="Policies that requests name; may be given several times."),
    ] = None,
    score: Annotated[bool, typer.Option("--score", help="Also what scoring texts needs.")] = False,
    implementation: ImplementationOption = None,
    dtype: DTypeOption = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            parser=_folder,
            metavar="FOLDER",
            help="Where compiled programs are kept; they are code and must be trusted.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the programs.")] = False,
    platform: Annotated[
        str | None, typer.Option(help='"tpu": compile for one on a machine that has none, and say what it would cost.')
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="With --platform tpu: v6e:1x1 (the default), v5e:1x1, v5p:1x1x1, v7x:1x1x1.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile ahead what requests can need, so that later processes find it."""
    from mamba_jax.planning import DEFAULT_POLICY

    for name in policy or ():
        _check_both("--policy", name, implementation)
    where = None if dry_run else _writable("--cache-dir", cache_dir)
    wanted: dict[str, Any] = {
        "batch": _numbers("--batch", batch, ","),
        "lengths": _numbers("--lengths", lengths, ":", count=2, ascending=True),
        "max_new_tokens": max_new_tokens,
        "policies": policy or [DEFAULT_POLICY],
        "tasks": ("generate", "score") if score else ("generate",),
        "implementation": implementation,
    }
    if platform not in (None, "tpu"):
        raise typer.BadParameter(f"got {platform!r}, wanted 'tpu' or nothing", param_hint="--platform")
    if topology and platform is None:
        raise typer.BadParameter("wanted --platform tpu beside it", param_hint="--topology")
    if platform and dry_run:
        raise typer.BadParameter("lists what this machine would compile: wanted no --platform", param_hint="--dry-run")
    if platform and cache_dir:
        raise typer.BadParameter("nothing that is compiled for another machine is kept", param_hint="--cache-dir")
    if platform:
        from mamba_jax.tpu import check_topology

        with _options("topology"):
            check_topology(topology or "v6e:1x1")
        facts, lines = _warm_tpu(_described(model, dtype), topology or "v6e:1x1", wanted)
    elif dry_run:
        from mamba_jax.warm import specs_for

        described = _described(model, dtype)
        with _options("batch", "lengths"):
            specs = specs_for(described, **wanted)
        facts = {"programs": [spec._asdict() | {"watch": spec.watch and repr(spec.watch)} for spec in specs]}
        lines = [" ".join(f"{name}={value}" for name, value in spec._asdict().items() if value) for spec in specs]
    else:
        import mamba_jax

        params = _load(model, dtype)
        with _options("batch", "lengths"):
            done = mamba_jax.warm(params, folder=where, **wanted)
        facts = dataclasses.asdict(done) | {"programs": len(done.programs), "folder": str(done.folder)}
        lines = [
            f"{len(done.programs)} programs: {done.compiled} compiled, {done.fetched} found in {done.folder}",
            f"{done.seconds:.1f} s, {done.bytes_written / 1e6:.1f} MB written",
        ]
    if as_json:
        _write_json(facts)
    else:
        _write("".join(f"{line}\n" for line in lines))


def _warm_tpu(model: "Model", topology: str, wanted: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from mamba_jax.warm import warm_tpu

    try:
        done = list(warm_tpu(model, topology, **wanted))
    except ImportError as error:
        raise ValueError(str(error)) from None
    programs, lines = [], []
    for spec, cost, seconds in ((one.spec, one.cost, one.seconds) for one in done):
        a = " a token" if spec.kind == "decode" else ""
        lines.append(
            f"{spec.kind}{' sampling' * spec.sampling} {spec.implementation} batch={spec.batch} length={spec.length}: "
            f"{cost.peak / 1e6:.0f} MB, "
            f"{'fits' if cost.fits else 'DOES NOT FIT'}; {cost.flops / 1e9:.2f} GFLOP and {cost.hbm_bytes / 1e6:.0f} MB"
            f"{a}, bound by {cost.bound}: at least {1e3 * cost.seconds:.3f} ms{a}; {cost.kernels} kernels; "
            f"compiled in {seconds:.1f} s"
        )
        programs.append(spec._asdict() | {"watch": spec.watch and repr(spec.watch)} | cost._asdict())
    lines.append(f"Computed from programs compiled for {topology}, not measured; nothing is kept of them.")
    return {"topology": topology, "computed": True, "programs": programs}, lines


@app.command()
def calibrate(
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(help="Numbers of prompts, as in 1,8; each of 1 to 65536.")] = "1",
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Samples of each program; a single one cannot tell noise.")
    ] = 7,
    dtype: DTypeOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            parser=_folder,
            metavar="FOLDER",
            help="Where tables are kept.",
            show_default="where requests look for them",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure chunk sizes, kernels and segment lengths on this device; later requests choose by what was measured.

    The table is a file, timings-DEVICE.json, in ~/.cache/mamba_jax unless MAMBA_JAX_CACHE or --folder names another
    folder. Deleting it undoes the calibration.
    """
    import mamba_jax
    from mamba_jax.scheduler.calibration import table_path

    sizes, where = _numbers("--batch", batch, ","), _writable("--folder", folder)
    params = _load(model, dtype)
    with _options("batch"):
        results = mamba_jax.calibrate(params, batch=sizes, rounds=rounds, folder=where)
    sys.stderr.write(f"kept in {table_path(results[0].device, where)}; deleting it undoes this\n")
    if as_json:
        _write_json({"calibrations": [dataclasses.asdict(result) for result in results]})
        return
    from rich.console import Console
    from rich.table import Table

    for result in results:
        chunks = sorted({timing.chunk_size for timing in result.timings})
        names = {chunk: str(chunk) if chunk else "kernels" for chunk in chunks}
        table = Table(title=f"{result.shape} on {result.device}, ms by chunk size")
        for column in ("positions", *names.values(), "best"):
            table.add_column(column, justify="right")
        for length in sorted({timing.length for timing in result.timings}):
            found = {timing.chunk_size: timing for timing in result.timings if timing.length == length}
            shown = [f"{found[c].median * 1e3:.2f}" if c in found else "" for c in chunks]
            best = result.best.get(length)
            table.add_row(str(length), *shown, "-" if best is None else names[best.chunk_size])
        Console(markup=False, highlight=False, width=140).print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="all, report, or one benchmark; a wrong one lists them.")],
) -> None:
    """Run a benchmark of a checkout; what follows its name are its own options.

    `mamba-jax bench all` runs the suite, small on a CPU and in the published sizes elsewhere (--small, --full), and
    writes JSON, pictures and one page of all into bench-results (--out). `mamba-jax bench NAME -- --help` has the
    options.
    """
    import runpy

    import mamba_jax

    root = Path(mamba_jax.__file__).parents[1]
    if not (root / "bench" / "common.py").is_file():
        raise ValueError("bench: got an installed package, wanted a checkout of the source, which has the benchmarks")
    files = (root / "bench").glob("*.py")
    names = sorted(file.stem for file in files if "typer.run(main)" in file.read_text(encoding="utf-8"))
    if name not in names:
        raise typer.BadParameter(f"got {name!r}, wanted one of {', '.join(names)}", param_hint="NAME")
    sys.path.insert(0, str(root))
    sys.argv = [name, *context.args]
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)


@app.command()
def layers(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Text to measure on.")],
    model: ModelOption = None,
    policy: Annotated[
        str, typer.Option(callback=_check_deciding, help="Decides by a statistic.")
    ] = "careful:entropy:sampled",
    dtype: DTypeOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Print the policy (for --policy elsewhere) of one chunk size a layer by that layer's statistics of a text."""
    import mamba_jax

    text = _decode(file.read_bytes(), str(file))
    if not text:
        raise ValueError("got an empty text, wanted one to measure on")
    _write(f"{mamba_jax.fix_layers(_load(model, dtype), text, policy, tokenizer=tokenizer).name}\n")


def _writable(option: str, folder: Path | None) -> Path | None:
    """The folder of an option, made and tried before anything takes long."""
    if folder is None:
        return None
    from mamba_jax.arguments import as_path
    from mamba_jax.scheduler.compilation_cache import make_folder

    try:
        return make_folder(as_path(option, folder))
    except (ValueError, OSError) as error:
        problem = str(error).removeprefix(f"{option}: ")
        raise typer.BadParameter(f"{problem}; wanted a folder to write to", param_hint=option) from error


@contextlib.contextmanager
def _options(*names: str) -> Iterator[None]:
    """What the library refuses of these arguments is a wrong use of the options of the same names."""
    try:
        yield
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        if name not in names:
            raise
        raise typer.BadParameter(problem, param_hint=f"--{name.replace('_', '-')}") from error


def _numbers(
    option: str, text: str, separator: str, count: int | None = None, *, ascending: bool = False
) -> tuple[int, ...]:
    """Numbers of at least 1; if `ascending`, none less than the one before it."""
    parts = [part.strip() for part in text.split(separator)]
    written = all(_NUMBER.fullmatch(part) for part in parts) and count in (None, len(parts))
    numbers = tuple(int(part) for part in parts) if written else ()
    if not numbers or min(numbers) < 1 or (ascending and list(numbers) != sorted(numbers)):
        examples = {":": "1:2048, the fewest first", "/": "1/2, the second the larger"}
        example = examples.get(separator, "128" if count == 1 else "1 or 1,8")
        raise typer.BadParameter(f"got {text!r:.80}, wanted numbers of at least 1, as in {example}", param_hint=option)
    return numbers


def _described(model: str | None, dtype: str | None) -> "Model":
    """What planning wants to know of a checkpoint on this machine's device, without reading its weights."""
    import jax

    from mamba_jax.checkpoints.archive import open_weights
    from mamba_jax.checkpoints.configs import read_config
    from mamba_jax.checkpoints.hub import find_folder
    from mamba_jax.checkpoints.loading import match_weights
    from mamba_jax.planning import Model
    from mamba_jax.progress import at_terminal

    folder = find_folder(_model(model), None, at_terminal())
    config, _ = read_config(folder)
    config, stored = match_weights(config, open_weights(folder), str(folder))
    device = jax.devices()[0]
    return Model(config, dtype or stored["embedding"].dtype.name, device.platform, device.device_kind)


def _read_prompt(prompt: str | None) -> str:
    """The prompt; of stdin's text without the newline that ends it."""
    text = _read_text(prompt, "PROMPT")
    if prompt in (None, "-"):
        text = text.removesuffix("\n").removesuffix("\r")
        if not text:
            raise ValueError("stdin: got no text, wanted a prompt (to begin with nothing, give an empty argument)")
    return text


def _read_text(text: str | None, name: str) -> str:
    """The argument, or stdin where the argument leaves it to that."""
    if text not in (None, "-"):
        return text
    if sys.stdin is None or (text is None and sys.stdin.isatty()):
        raise typer.BadParameter("no text: give it as an argument or on stdin", param_hint=name)
    return _decode(sys.stdin.buffer.read(), "stdin")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: got bytes that are no UTF-8 text: {error}") from error


def _model(model: str | None) -> str:
    import mamba_jax

    return model if model is not None else str(mamba_jax.default_model())


def _load(model: str | None, dtype: str | None) -> "Params":
    import mamba_jax

    return mamba_jax.load(_model(model), dtype=dtype)


def _enable_cache() -> None:
    """Later processes start warm; where no cache can be kept, this one runs all the same."""
    from mamba_jax.scheduler.compilation_cache import enable_compilation_cache

    try:
        enable_compilation_cache()
    except OSError as error:
        sys.stderr.write(f"no compilation cache: {error}\n")


def _write(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_json(value: dict[str, Any]) -> None:
    _write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with null for what is no number in JSON: infinities, as a perplexity beyond the floats or no limit."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
