r"""Train the model that ships with mamba_jax: a small Mamba-2 on public-domain books, in minutes on one GPU.

    python examples/train_default.py --books BOOKS.txt.xz --out DIR

The loss is the mean of -log p(token | tokens before it) over random windows of the books, through
`mamba_jax.forward`. Master weights are float32 and multiply in bfloat16. The books are few for the model, so it is
trained many times over them, under three brakes: decoupled weight decay, dropout (see `thin`) and an exponential
moving average of the weights, which is what is validated and kept. The weights that validate best are saved, in
Hugging Face layout, whenever they improve, with their tokenizer, the log, the loss curve and a model card beside them.
"""

import dataclasses
import datetime
import functools
import json
import math
import tempfile
import time
from pathlib import Path
from string import Template
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from books import encode, read_documents, save_tokenizer, split_documents, token_bytes, train_tokenizer
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt16
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

import mamba_jax
from mamba_jax.checkpoints import save
from mamba_jax.params import FLOAT32_FIELDS, Params, TextInfo

CONSOLE = Console(soft_wrap=True)
PROMPT = "It was a dark night"
SAVE_EVERY_S = 30.0  # seconds between checkpoints while the validation loss keeps falling
FINISH_S = 30.0  # of the time budget, kept for saving and for the sample


@struct.dataclass
class Recipe:
    """Numbers of the training that are traced, so that other values reuse the compiled program."""

    learning_rate: float
    weight_decay: float
    dropout: float
    ema_decay: float
    warmup_steps: int


@struct.dataclass
class TrainState:
    """What a step changes. `ema` is the moving average of `params`; all float32."""

    params: Params
    ema: Params
    opt_state: optax.OptState
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a step: `groups` of the batch's windows draw their own dropout masks."""

    batch: int
    seq_len: int
    groups: int
    chunk_size: int


@struct.dataclass
class Validation:
    """Held-out text as windows of inputs and the target after each, and the targets' bytes."""

    tokens: Int[Array, "n b l+1"]
    scored: Float[Array, "n b l"]  # 0 at the padding of the last window
    bytes: int = struct.field(pytree_node=False)


# ----------------------------------------------------------------------------------------------------------- a step


def field_name(path: tuple[Any, ...]) -> str:
    """The field of `Params` or of a layer that a pytree path ends in."""
    return str(path[-1].name)


def cast(params: Params, dtype: Any = jnp.bfloat16) -> Params:
    """Weights in `dtype`, the recurrence's own (A_log, D, dt_bias) left in float32: a model as it is used."""
    return jax.tree.map_with_path(lambda p, w: w if field_name(p) in FLOAT32_FIELDS else w.astype(dtype), params)


def thin(params: Params, key: PRNGKeyArray, rate: float) -> Params:
    """Dropout as a change of weights: the model itself has none, and needs none.

    Whole input columns of in_proj and out_proj vanish, which drops channels of the normalised residual stream and of
    the mixer's output, the same at all positions. Words are not dropped: a zero embedding stays zero through all
    layers, and the gradient of a norm at zero is 1 / sqrt(eps) in each of them.
    """

    def mask(i: int, size: int) -> Float[Array, "size"]:
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1.0 - rate, (size,))
        return (keep / (1.0 - rate)).astype(params.dtype)

    config = params.config
    layers = tuple(
        dataclasses.replace(
            layer,
            in_proj=layer.in_proj * mask(2 * i, config.d_model),
            out_proj=layer.out_proj * mask(2 * i + 1, config.d_inner),
        )
        for i, layer in enumerate(params.layers)
    )
    return dataclasses.replace(params, layers=layers)


def token_losses(params: Params, tokens: Int[Array, "b l+1"], chunk_size: int) -> Float[Array, "b l"]:
    """-log p of every token but the first, in nats."""
    logits = mamba_jax.forward(params, tokens[:, :-1], chunk_size=chunk_size)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def windows(data: UInt16[Array, "n"], key: PRNGKeyArray, shape: Shape) -> Int[Array, "groups b l+1"]:
    """Random windows of the training text, one token longer than the model reads, since each is its next's target."""
    length = shape.seq_len + 1
    starts = jax.random.randint(key, (shape.batch,), 0, data.shape[0] - length + 1)
    rows = jax.vmap(lambda start: jax.lax.dynamic_slice(data, (start,), (length,)))(starts)
    return rows.astype(jnp.int32).reshape(shape.groups, shape.batch // shape.groups, length)


def learning_rate(step: Int[Array, ""], total: Int[Array, ""], recipe: Recipe) -> Float[Array, ""]:
    """Linear warm-up, then half a cosine to zero at `total`."""
    warm = jnp.minimum(1.0, (step + 1) / recipe.warmup_steps)
    progress = jnp.clip((step - recipe.warmup_steps) / jnp.maximum(total - recipe.warmup_steps, 1), 0.0, 1.0)
    return recipe.learning_rate * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def decayed(params: Params) -> Params:
    """Mask of the weights that decay: the matrices, but not what sets time scales, norms and biases."""

    def decays(path: tuple[Any, ...], _: Array) -> bool:
        name = field_name(path)
        return name not in FLOAT32_FIELDS and "norm" not in name and not name.endswith("_bias")

    return jax.tree.map_with_path(decays, params)


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW up to the learning rate; a step whose gradient is not finite changes nothing, a third in a row does."""
    adamw = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(recipe.weight_decay, mask=decayed),
    )
    return optax.apply_if_finite(adamw, max_consecutive_errors=2)


@functools.partial(jax.jit, static_argnames=("steps", "shape"), donate_argnames="state")
def train_block(
    state: TrainState,
    data: UInt16[Array, "n"],
    total: Int[Array, ""],
    recipe: Recipe,
    key: PRNGKeyArray,
    *,
    steps: int,
    shape: Shape,
) -> tuple[TrainState, Float[Array, "steps"]]:
    """Take `steps` steps in one dispatch.

    Returns:
        The new state, and the training loss of each step (with dropout), in nats a token.
    """

    def loss(params: Params, step_key: PRNGKeyArray) -> Float[Array, ""]:
        pick, drop = jax.random.split(step_key)
        weights = cast(params)

        def group_loss(group_key: PRNGKeyArray, tokens: Int[Array, "b l+1"]) -> Float[Array, ""]:
            return token_losses(thin(weights, group_key, recipe.dropout), tokens, shape.chunk_size).mean()

        return jax.vmap(group_loss)(jax.random.split(drop, shape.groups), windows(data, pick, shape)).mean()

    def step(state: TrainState, _: None) -> tuple[TrainState, Float[Array, ""]]:
        value, grads = jax.value_and_grad(loss)(state.params, jax.random.fold_in(key, state.step))
        updates, opt_state = optimizer(recipe).update(grads, state.opt_state, state.params)
        rate = learning_rate(state.step, total, recipe)
        params = jax.tree.map(lambda w, u: w - rate * u, state.params, updates)
        decay = jnp.minimum(recipe.ema_decay, (state.step + 1) / (state.step + 10))  # forget the first steps sooner
        ema = jax.tree.map(lambda e, w: decay * e + (1.0 - decay) * w, state.ema, params)
        return TrainState(params, ema, opt_state, state.step + 1), value

    return jax.lax.scan(step, state, None, length=steps)


# ------------------------------------------------------------------------------------------------------- validation


def validation_windows(ids: np.ndarray, bytes_of: np.ndarray, shape: Shape) -> Validation:
    """Cut held-out ids into windows in which every id but the first is a target exactly once."""
    rows = -(-(len(ids) - 1) // shape.seq_len)
    batches = -(-rows // shape.batch)
    size = batches * shape.batch * shape.seq_len
    padded = np.zeros(size + 1, np.int32)
    padded[: len(ids)] = ids
    inputs, targets = padded[:-1].reshape(-1, shape.seq_len), padded[1:].reshape(-1, shape.seq_len)
    tokens = np.concatenate([inputs, targets[:, -1:]], axis=1).reshape(batches, shape.batch, shape.seq_len + 1)
    scored = (np.arange(size) < len(ids) - 1).astype(np.float32).reshape(batches, shape.batch, shape.seq_len)
    return Validation(jnp.asarray(tokens), jnp.asarray(scored), int(bytes_of[ids[1:]].sum()))


@functools.partial(jax.jit, static_argnames="chunk_size")
def validate(params: Params, validation: Validation, *, chunk_size: int) -> tuple[Float[Array, ""], Params]:
    """Mean loss of the held-out tokens in nats, of the weights as they would be saved; and those weights."""
    weights = cast(params)

    def batch_sum(batch: tuple[Array, Array]) -> Float[Array, ""]:
        tokens, scored = batch
        return (token_losses(weights, tokens, chunk_size) * scored).sum()

    total = jax.lax.map(batch_sum, (validation.tokens, validation.scored)).sum()
    return total / validation.scored.sum(), weights


def bits_per_byte(nats_per_token: float, validation: Validation) -> float:
    """The same loss, free of the tokenizer: bits for each byte of the held-out text."""
    return nats_per_token * float(validation.scored.sum()) / math.log(2) / validation.bytes


# ------------------------------------------------------------------------------------------------------ the program


@dataclasses.dataclass
class Log:
    """The course of a training; written beside the weights as JSON and as a picture."""

    facts: dict[str, Any]
    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write training_log.json, and loss_curve.png where matplotlib is installed."""
        text = json.dumps({"facts": self.facts, "rows": self.rows}, indent=1, allow_nan=False)
        (folder / "training_log.json").write_text(text + "\n")
        try:
            from matplotlib.figure import Figure
        except ImportError:  # a picture is no reason to lose a training
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes, steps = figure.subplots(), [row["step"] for row in self.rows]
        axes.plot(steps, [row["train_loss"] for row in self.rows], label="training, with dropout")
        axes.plot(steps, [row["validation_loss"] for row in self.rows], label="validation, averaged weights")
        best = min(self.rows, key=lambda row: row["validation_loss"])
        axes.set_title(
            f"best validation {best['validation_loss']:.3f} nats/token, {best['bits_per_byte']:.3f} bits/byte"
        )
        axes.set(xlabel="step", ylabel="loss (nats/token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / "loss_curve.png", dpi=120)


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a training reads."""

    data: UInt16[Array, "n"]
    validation: Validation
    recipe: Recipe
    shape: Shape
    seed: int
    out: Path


def start(job: Job, config: mamba_jax.MambaConfig) -> TrainState:
    """Random weights and a fresh optimiser."""
    text = TextInfo(tokenizer=str(job.out), eos_token_ids=(0,), bos_token_id=0, pad_token_id=0)
    params = mamba_jax.init_params(config, jax.random.key(job.seed), jnp.float32)
    params = dataclasses.replace(params, text=text)
    ema = jax.tree.map(jnp.copy, params)  # donated buffers must not be shared
    return TrainState(params, ema, optimizer(job.recipe).init(params), jnp.zeros((), jnp.int32))


def run_block(state: TrainState, job: Job, steps: int, total: int) -> tuple[TrainState, Params, dict[str, float]]:
    """Take some steps and validate the averaged weights.

    Returns:
        The new state, the averaged weights as they would be saved, and a row for the log.

    Raises:
        FloatingPointError: if a loss is not finite.
    """
    began, key = time.monotonic(), jax.random.key(job.seed + 1)
    state, losses = train_block(state, job.data, jnp.int32(total), job.recipe, key, steps=steps, shape=job.shape)
    loss, weights = validate(state.ema, job.validation, chunk_size=job.shape.chunk_size)
    row = {"step": int(state.step), "train_loss": float(losses.mean()), "validation_loss": float(loss)}
    row["bits_per_byte"] = bits_per_byte(row["validation_loss"], job.validation)
    row["seconds"] = time.monotonic() - began
    if not all(math.isfinite(value) for value in row.values()):
        raise FloatingPointError(f"the loss is no longer finite: {row}")
    return state, weights, row


def fit(state: TrainState, job: Job, log: Log, *, blocks: int, block: int, deadline: float | None) -> None:
    """Train for `blocks` blocks of `block` steps, or as many fewer as fit before `deadline`; save the best weights.

    The second block, which no longer compiles, tells the time of a block and so the length of the schedule. The
    learning rate does not depend on that length before, since it still warms up.
    """
    best, best_weights, unsaved, saved_at = math.inf, state.ema, False, 0.0
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=CONSOLE) as progress:
        task, done = progress.add_task("compiling", total=blocks * block), 0
        while done < blocks:
            state, weights, row = run_block(state, job, block, blocks * block)
            done, now = done + 1, time.monotonic()
            log.rows.append(row)
            if row["validation_loss"] < best:
                best, best_weights, unsaved = row["validation_loss"], weights, True
            if deadline is not None and done == 2:
                blocks = min(blocks, done + max(int((deadline - now) / row["seconds"]), 0))
                CONSOLE.print(f"{row['seconds'] / block * 1e3:.1f} ms a step: {blocks * block} steps in all")
            if unsaved and now - saved_at > SAVE_EVERY_S:
                write_model(best_weights, job.out)
                log.write(job.out)
                unsaved, saved_at = False, time.monotonic()
            text = f"loss {row['train_loss']:.3f}, validation {row['validation_loss']:.3f}, best {best:.3f} nats/token"
            progress.update(task, completed=done * block, total=blocks * block, description=text)
            if done % 5 == 0:  # for a log file, which shows no bar
                CONSOLE.print(f"step {done * block}: {text}, {row['bits_per_byte']:.3f} bits/byte")
    if unsaved:
        write_model(best_weights, job.out)


def write_model(params: Params, out: Path) -> None:
    """Write the model beside its tokenizer, over an earlier checkpoint of the same training."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=out) as folder:
        save(params, folder, layout="hf")
        for file in Path(folder).iterdir():
            file.replace(out / file.name)


def prepare(books: Path, tokenizer_file: Path | None, vocab_size: int) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Read the books; give the tokenizer, trained unless given, and the ids of training and held-out text."""
    train, held_out = split_documents(read_documents(books))
    if tokenizer_file is None:
        tokenizer = train_tokenizer(train, vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return tokenizer, encode(tokenizer, train), encode(tokenizer, held_out)


def main(
    *,
    books: Annotated[Path, typer.Option(exists=True, help="Public-domain books, documents split by <|endoftext|>.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its tokenizer, the log and the loss curve.")],
    minutes: Annotated[float, typer.Option(help="Wall time of the whole run, compiling included.")] = 5.0,
    epochs: Annotated[float, typer.Option(help="Passes over the books at most, if the time allows them.")] = 60.0,
    steps: Annotated[int | None, typer.Option(help="So many steps, in whole blocks, whatever time they take.")] = None,
    seed: int = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to use instead of training one.")] = None,
    vocab_size: int = 4096,
    d_model: int = 288,
    layers: int = 8,
    d_state: int = 64,
    headdim: int = 64,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens a window.")] = 1024,
    groups: Annotated[int, typer.Option(help="Parts of the batch with dropout masks of their own.")] = 16,
    chunk_size: Annotated[int, typer.Option(help="Of the scans; speed only.")] = 64,
    block: Annotated[int, typer.Option(help="Steps a dispatch, and between validations.")] = 100,
    learning_rate: float = 3e-3,
    weight_decay: float = 0.3,
    dropout: float = 0.1,
    ema_decay: float = 0.998,
) -> None:
    """Train the default model of mamba_jax on public-domain books."""
    began = time.monotonic()
    if batch % groups:
        raise typer.BadParameter(f"groups: got {groups}, wanted a divisor of batch={batch}")
    if (out / "config.json").exists():
        raise typer.BadParameter(f"out: {out} already holds a model, wanted another folder")
    out.mkdir(parents=True, exist_ok=True)
    text_tokenizer, train_ids, held_out_ids = prepare(books, tokenizer, vocab_size)
    save_tokenizer(text_tokenizer, out)
    shape = Shape(batch, seq_len, groups, chunk_size)
    recipe = Recipe(learning_rate, weight_decay, dropout, ema_decay, warmup_steps=2 * block)
    config = mamba_jax.MambaConfig(
        layer="mamba2",
        vocab_size=text_tokenizer.get_vocab_size(),
        d_model=d_model,
        n_layer=layers,
        d_inner=2 * d_model,
        d_state=d_state,
        headdim=headdim,
        chunk_size=chunk_size,
    )
    validation = validation_windows(held_out_ids, token_bytes(text_tokenizer), shape)
    job = Job(jnp.asarray(train_ids), validation, recipe, shape, seed, out)
    state = start(job, config)
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}",
        "training_tokens": f"{len(train_ids):,}",
        "held_out_tokens": f"{len(held_out_ids):,}",
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **dataclasses.asdict(shape),
        **dataclasses.asdict(recipe),
        **{
            name: getattr(config, name) for name in ("vocab_size", "n_layer", "d_model", "d_state", "headdim", "nheads")
        },
    }
    CONSOLE.print(facts)
    epoch = len(train_ids) / (batch * seq_len)
    log = Log(facts)
    fit(
        state,
        job,
        log,
        blocks=math.ceil((steps or epochs * epoch) / block),
        block=block,
        deadline=began + 60 * minutes - FINISH_S if steps is None else None,
    )
    log.write(out)
    write_card(log, out, epoch, time.monotonic() - began)
    sample(out)


def write_card(log: Log, out: Path, epoch: float, seconds: float) -> None:
    """Fill in the model card, README.md."""
    best, steps = min(log.rows, key=lambda row: row["validation_loss"]), int(log.rows[-1]["step"])
    tuned = ("seed", "learning_rate", "weight_decay", "dropout", "ema_decay")
    options = " ".join(f"--{name.replace('_', '-')} {log.facts[name]}" for name in tuned)
    card = Template((Path(__file__).parent / "model_card.md").read_text(encoding="utf-8")).substitute(
        log.facts,
        loss=f"{best['validation_loss']:.3f}",
        bits=f"{best['bits_per_byte']:.3f}",
        steps=steps,
        step_tokens=f"{log.facts['batch'] * log.facts['seq_len']:,}",
        epochs=f"{steps / epoch:.0f}",
        minutes=f"{seconds / 60:.1f}",
        command=f"python examples/train_default.py --books BOOKS.txt.xz --out DIR --steps {steps} {options}",
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def sample(folder: Path) -> None:
    """Print how the saved model continues a sentence."""
    params = mamba_jax.load(folder)
    for temperature in (0.0, 0.7):
        text = "".join(mamba_jax.stream(params, PROMPT, max_new_tokens=120, temperature=temperature))
        CONSOLE.print(f"temperature {temperature}: {PROMPT}{text}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
