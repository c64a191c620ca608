"""Training of language models on the novels. `python -m linattn_edu.train` makes the shipped model."""

try:
    import tqdm  # noqa: F401
except ImportError as error:
    raise ImportError('linattn_edu.train needs tqdm: pip install "linattn_edu[train]"') from error

from linattn_edu.train.loop import adamw, evaluate, learning_rate, loss_by_position, summary, train

__all__ = ["adamw", "evaluate", "learning_rate", "loss_by_position", "summary", "train"]
