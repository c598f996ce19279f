"""The architecture of a Mamba language model: every size and switch that shapes a program, and nothing else."""

import dataclasses
import math
from typing import Literal

LayerKind = Literal["mamba1", "mamba2"]


def _is_number(value: object) -> bool:
    """Whether it is one that a float can hold; infinity is."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(float(value))
    except OverflowError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Static, hashable description of a model; names follow mamba_ssm.

    Attributes:
        layer: kind of every mixer layer.
        vocab_size: number of token ids that mean something; the embedding may hold more rows (`padded_vocab_size`).
        pad_vocab_size_multiple: the embedding's rows are `vocab_size` rounded up to this.
        d_model: width of the residual stream.
        n_layer: number of layers.
        d_inner: width inside a mixer; for Mamba-2 it is nheads * headdim.
        d_state: state size a channel (Mamba-1) or a head row (Mamba-2).
        d_conv: width of the causal depthwise convolution.
        dt_rank: Mamba-1: rank of the dt projection. 0 for Mamba-2.
        bcdt_norm_eps: Falcon-Mamba: epsilon of the weightless RMSNorm on B, C and dt; None has no such norm.
        headdim: Mamba-2: channels a head. 0 for Mamba-1.
        ngroups: Mamba-2: groups that B, C and the gated norm are split into.
        chunk_size: Mamba-2: the chunk size the model was published with; speed only, never results.
        gated_norm: Mamba-2: RMSNorm between scan and out_proj; without it the gate alone.
        norm_before_gate: Mamba-2: norm(y) * silu(z) instead of norm(y * silu(z)).
        D_has_hdim: Mamba-2: D is (nheads, headdim) instead of (nheads,).
        dt_limit: Mamba-2: clamp of dt after softplus.
        block_norm: "rms" or "layer": the norm before each mixer and before the head.
        norm_eps: epsilon of the block norms and the gated norm.
        conv_bias: the convolution has a bias.
        proj_bias: in_proj and out_proj have biases.
        tie_embeddings: the head is the embedding.
        residual_in_fp32: the residual stream is float32 whatever the weights are.

    Raises:
        ValueError: if the sizes contradict each other; the message names the fields.
    """

    layer: LayerKind
    vocab_size: int
    pad_vocab_size_multiple: int = 1
    d_model: int
    n_layer: int
    d_inner: int
    d_state: int
    d_conv: int = 4
    dt_rank: int = 0
    bcdt_norm_eps: float | None = None
    headdim: int = 0
    ngroups: int = 1
    chunk_size: int = 256
    gated_norm: bool = True
    norm_before_gate: bool = False
    D_has_hdim: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    block_norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    conv_bias: bool = True
    proj_bias: bool = False
    tie_embeddings: bool = True
    residual_in_fp32: bool = True

    def __post_init__(self) -> None:
        if self.layer not in ("mamba1", "mamba2"):
            raise ValueError(f"layer: got {self.layer!r:.80}, wanted 'mamba1' or 'mamba2'")
        if self.block_norm not in ("rms", "layer"):
            raise ValueError(f"block_norm: got {self.block_norm!r:.80}, wanted 'rms' or 'layer'")
        sizes = ["vocab_size", "pad_vocab_size_multiple", "d_model", "n_layer", "d_inner", "d_state", "d_conv"]
        sizes += ["dt_rank"] if self.layer == "mamba1" else ["headdim", "ngroups", "chunk_size"]
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r:.80}, wanted an integer of at least 1")
        if self.d_conv < 2:
            raise ValueError(f"d_conv: got {self.d_conv}, wanted at least 2")
        if self.layer == "mamba2":
            if self.d_inner % self.headdim:
                raise ValueError(
                    f"d_inner={self.d_inner} is not a multiple of headdim={self.headdim}: "
                    "set headdim to a divisor of d_inner, or a larger expand"
                )
            if self.nheads % self.ngroups:
                raise ValueError(f"ngroups={self.ngroups} does not divide nheads={self.nheads} (d_inner / headdim)")
        self._check_switches()

    def _check_switches(self) -> None:
        for name in (field.name for field in dataclasses.fields(self) if field.type is bool):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r:.80}, wanted True or False")
        for name, absent in (("norm_eps", False), ("bcdt_norm_eps", True)):
            value = getattr(self, name)
            if not (absent and value is None) and not (_is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name}: got {value!r:.80}, wanted a finite number of at least 0")
        limit = self.dt_limit
        if not isinstance(limit, tuple) or len(limit) != 2 or not all(map(_is_number, limit)):
            raise ValueError(f"dt_limit: got {limit!r:.80}, wanted a tuple of two numbers")
        if not 0.0 <= limit[0] <= limit[1] or limit[0] == math.inf:
            raise ValueError(f"dt_limit: got {limit}, wanted 0 <= low <= high, and a finite low")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the logits."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @property
    def nheads(self) -> int:
        """Mamba-2: number of heads."""
        return self.d_inner // self.headdim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x alone (Mamba-1), or x, B and C (Mamba-2)."""
        return self.d_inner if self.layer == "mamba1" else self.d_inner + 2 * self.ngroups * self.d_state

    @property
    def in_proj_width(self) -> int:
        """Outputs of in_proj: x and z (Mamba-1), or z, x, B, C and dt (Mamba-2)."""
        return 2 * self.d_inner if self.layer == "mamba1" else self.d_inner + self.conv_channels + self.nheads
