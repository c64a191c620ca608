"""Training of language models on the novels. `python -m linattn_edu.train` makes the shipped model."""

from linattn_edu.train.loop import adamw, evaluate, learning_rate, loss_by_position, summary, train

__all__ = ["adamw", "evaluate", "learning_rate", "loss_by_position", "summary", "train"]
