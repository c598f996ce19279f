"""Parity with mamba_ssm in one process: `python -m bench.parity_mamba_ssm --model FOLDER [--model FOLDER]...`.

Wants a machine on which both mamba_ssm (with its CUDA kernels) and JAX see an NVIDIA GPU. Hidden states, logits, greedy
tokens and, with a text, the perplexity of both sides, held against the tolerances of "Compiler-First State Space
Duality" (Tables 5 and 6). mamba_ssm multiplies float32 in TF32 in its Triton kernels, whatever is asked for; a recorded
truth beside the checkpoint (golden.safetensors) says which side is how far from it.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def main(
    model: Annotated[list[str], typer.Option(help="Folder or hub id of a checkpoint.")],
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="To take the perplexity of.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where there is none beside the weights.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 and bfloat16, if none is given.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
) -> None:
    """Compare with mamba_ssm on this machine's GPU; exits with 1 if a float32 result is outside the tolerances."""
    if importlib.util.find_spec("mamba_ssm") is None:
        sys.exit("mamba_ssm is not installed: it needs an NVIDIA GPU and `pip install mamba-ssm causal-conv1d`")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants some of the memory, too
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device, which mamba_ssm runs on")
    import mamba_jax
    from bench.common import environment
    from mamba_jax import cli, parity

    content = None if text is None else text.read_text(encoding="utf-8")
    results: list[dict[str, Any]] = []
    report = environment("parity_mamba_ssm", ("jax", "jaxlib", "torch", "mamba_ssm")) | {"results": results}
    verdicts = []
    for name in model:
        golden = Path(name) / "golden.safetensors"
        for kind in dtype or ["float32", "bfloat16"]:
            weights: Any = kind
            params = mamba_jax.load(name, dtype=weights)
            for other in ("mamba_ssm", *([str(golden)] if golden.is_file() else [])):
                asked = content if other == "mamba_ssm" else None
                found = parity.against(params, other, text=asked, tokenizer=tokenizer)
                cli.print_parity(found)
                verdicts.append(found.verdict)
                results.append({"model": Path(name).name, **dataclasses.asdict(found)})
                if out is not None:
                    out.write_text(json.dumps(report, indent=1) + "\n")
    if False in verdicts:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
