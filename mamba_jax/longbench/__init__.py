"""LongBench (Bai et al., 2024, arXiv:2308.14508): long questions put to a model, and how well it answers them.

The samples and the templates of the prompts are files of the user's; none come with this package.
"""

from mamba_jax.longbench.data import Sample, find_tasks, load_samples
from mamba_jax.longbench.harness import merge, run
from mamba_jax.longbench.metrics import METRICS, score_prediction
from mamba_jax.longbench.prompts import Template, cut_middle, load_templates
from mamba_jax.longbench.summary import Summary, TaskSummary

__all__ = [
    "METRICS",
    "Sample",
    "Summary",
    "TaskSummary",
    "Template",
    "cut_middle",
    "find_tasks",
    "load_samples",
    "load_templates",
    "merge",
    "run",
    "score_prediction",
]
