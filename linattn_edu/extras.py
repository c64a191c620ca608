"""Packages that parts of this one need beyond torch and NumPy."""

import importlib

EXTRAS = {"matplotlib": "viz", "IPython": "viz", "tqdm": "train", "safetensors": "models"}
"""Which extra of `pip install "linattn_edu[...]"` brings a package."""


def need(module, user):
    """The module of that name; `user` says in the error what cannot do without it.

    Raises:
        ImportError: it is missing; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'{user} needs {package}: pip install "linattn_edu[{EXTRAS[package]}]"') from error
